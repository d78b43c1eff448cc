"""generate()'s compiled step without guards on the insides of wrapped layers: nothing may pass for another graph."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from enabled import enabled
from models import BUILDS, ONE_LAYER, prompts
from oracle import adapters, relative_error
from test_compile import Backend
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_multilora import disable_multilora, enable_multilora
from hf_multilora.generation.compiled import MAX_KEPT, insides
from hf_multilora.layers import LoraLayer

SETTINGS = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
IDS: Any = ["r8", None, "r3"]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def counting(**options: Any) -> tuple[Backend, CompileConfig]:
    backend = Backend()
    config = CompileConfig(backend=backend, mode=None, **{"fullgraph": True, **options})
    config._compile_all_devices = True  # on a CPU, for the test
    return backend, config


def logits(model: PreTrainedModel, ids: Any = IDS, **options: Any) -> torch.Tensor:
    found = model.generate(
        **prompts(3), **SETTINGS, adapter_ids=ids, output_logits=True, return_dict_in_generate=True, **options
    )
    return torch.stack(found.logits)


def assert_as_uncompiled(model: PreTrainedModel, config: CompileConfig) -> torch.Tensor:
    """The compiled steps give what uncompiled ones do, with adapters and without."""
    for ids in (None, IDS):
        got, want = logits(model, ids, compile_config=config), logits(model, ids, disable_compile=True)
        exact = model.dtype is torch.float32
        assert relative_error(got, want) <= (1e-4 if exact else 0.05), ids
    return got


def frames(model: PreTrainedModel) -> list[Any]:
    """Dynamo's entries for the compiled step that ran last: one for each of its graphs."""
    _, _, compiled = model.multilora.calls.steps._kept[-1]
    return _debug_get_cache_entry_list(compiled._torchdynamo_orig_callable.__code__)


def guards(model: PreTrainedModel) -> list[str]:
    """All guards of the graph that was compiled last, as Dynamo prints them."""
    newest = frames(model)[0]
    lines = str(newest.guard_manager).splitlines()
    return [line.split("  # ")[0] for line in lines if "GuardManager" not in line]  # source code follows


def reweighted(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.flip(0))
    return model


def other(max_lora_rank: int, seed: int) -> PreTrainedModel:
    """A model with adapters of the same names, other weights, and slots of another size."""
    torch.manual_seed(seed)
    model = enabled(ONE_LAYER, ["r8", "r3"], max_lora_rank=max_lora_rank)
    return model if seed == 0 else reweighted(model)


def test_guards_that_stay_do_not_grow_with_what_is_in_wrapped_layers() -> None:
    """Routing's, the inputs' and the model's own stay; of wrapped layers none does."""
    counts: dict[Any, list[int]] = {}
    for layers in (1, 2, 4):
        config = LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2,
            pad_token_id=0, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model = enable_multilora(LlamaForCausalLM(config).eval(), max_loras=2, max_lora_rank=4)
        path = "model.layers.0.self_attn.q_proj"
        tensors = {f"base_model.model.{path}.lora_{part}.weight": torch.randn(4, 16).T[:, :4] for part in "B"}
        tensors[f"base_model.model.{path}.lora_A.weight"] = torch.randn(4, 16)
        model.multilora.load(
            tensors, "a", config={"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": [path]}
        )
        for ids in (None, ["a", None]):
            torch.compiler.reset()
            inputs = {"input_ids": torch.randint(1, 64, (2, 5)), "attention_mask": torch.ones(2, 5, dtype=torch.long)}
            model.generate(**inputs, **SETTINGS, compile_config=counting()[1], adapter_ids=ids)
            found = guards(model)
            assert not any("_proj" in line or "lm_head" in line or "embed_tokens" in line for line in found)
            for name in ("state", "_threads.force.way", "default") if ids is None else ("static", "_span", "vectors"):
                assert any(f"routing.{name}" in line for line in found), name
            assert any("input_layernorm" in line for line in found)
            assert any("GRAD_MODE" in line or "GLOBAL_STATE" in line for line in found)
            counts.setdefault(ids is None, []).append(len(found))
    bare = [one - other for one, other in zip(counts[True][1:], counts[True], strict=False)]
    adapted = [one - other for one, other in zip(counts[False][1:], counts[False], strict=False)]
    assert bare[1] == 2 * bare[0]
    assert adapted[0] <= bare[0] + 2 and adapted[1] <= bare[1] + 4, (bare, adapted)


def test_two_models_of_one_shape_do_not_share_graphs() -> None:
    """A hundred calls by turns: neither takes the other's graph, and nothing is compiled after the first round."""
    (backend, config), models = counting(), [other(128, 0), other(64, 1)]
    results = [assert_as_uncompiled(model, config) for model in models]
    assert not torch.equal(*results)
    made = backend.graphs
    for turn in range(100):
        got = logits(models[turn % 2], compile_config=config)
        assert torch.equal(got, results[turn % 2]), turn
    assert backend.graphs == made


def test_a_forward_that_breaks_keeps_all_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after a break runs in frames that both models share."""
    models = [other(128, 0), other(64, 1)]
    act = type(models[0].model.layers[0].mlp.act_fn)
    forward = act.forward

    def broken(self: Any, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return forward(self, x)

    monkeypatch.setattr(act, "forward", broken)
    backend, config = counting(fullgraph=False)
    results = [assert_as_uncompiled(model, config) for model in models]
    made = backend.graphs
    for turn in range(10):
        assert torch.equal(logits(models[turn % 2], compile_config=config), results[turn % 2])
    assert backend.graphs == made > 4


def data(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(0).clone()


def assigned(model: PreTrainedModel) -> None:
    twin = reweighted(BUILDS[ONE_LAYER].build())
    model.load_state_dict(twin.state_dict(), assign=True)


def cast(model: PreTrainedModel) -> None:
    model.to(torch.bfloat16)


def anew(model: PreTrainedModel) -> None:
    """Slots of another size, and other adapters under the same names."""
    disable_multilora(model)
    enable_multilora(model, max_loras=3, max_lora_rank=64)
    model.load_adapter(adapters(ONE_LAYER)["r16"], adapter_name="r8")
    model.load_adapter(adapters(ONE_LAYER)["r1"], adapter_name="r3")


def hooked(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, output: output * 2)


def hooked_before(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def patched(model: PreTrainedModel) -> None:
    layer = model.model.layers[0].mlp.down_proj
    forward = layer.forward
    layer.forward = lambda x: forward(x) * 3


def replaced(model: PreTrainedModel) -> None:
    model.lm_head.bias = torch.nn.Parameter(torch.arange(113.0))


def scaled(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.scaling *= 3


def epsilon(model: PreTrainedModel) -> None:
    model.model.norm.variance_epsilon = 5.0


@pytest.mark.parametrize(
    "change", [data, assigned, cast, anew, hooked, hooked_before, patched, replaced, scaled, epsilon]
)
def test_what_changes_between_calls_is_seen(change: Callable[[Any], None]) -> None:
    model = other(128, 0)
    _, config = counting(fullgraph=change is not patched)
    before = assert_as_uncompiled(model, config)
    change(model)
    after = assert_as_uncompiled(model, config)
    assert relative_error(after.float(), before.float()) > 1e-3, "the change shows at all"


def test_attention_and_config() -> None:
    """Guards on the model itself are Dynamo's, and stay."""
    model, (backend, config) = other(128, 0), counting()
    assert_as_uncompiled(model, config)
    made = backend.graphs
    model.set_attn_implementation("eager")
    assert_as_uncompiled(model, config)
    assert backend.graphs == 2 * made
    model.config.output_hidden_states = True
    assert_as_uncompiled(model, config)
    assert backend.graphs == 3 * made


def test_a_hook_that_goes_again_leaves_the_graphs() -> None:
    model, (backend, config) = other(128, 0), counting()
    before = assert_as_uncompiled(model, config)
    made = backend.graphs
    handle = model.lm_head.register_forward_hook(lambda module, args, output: output + 1)
    assert torch.allclose(assert_as_uncompiled(model, config), before + 1, atol=1e-4)
    now = backend.graphs
    assert now > made
    handle.remove()
    assert torch.equal(assert_as_uncompiled(model, config), before)
    assert backend.graphs == now


def test_new_weights_compile_nothing() -> None:
    """Graphs read weights where they are."""
    model, (backend, config) = other(128, 0), counting()
    assert_as_uncompiled(model, config)
    made = backend.graphs
    for change in (data, assigned, reweighted):
        change(model)
        assert_as_uncompiled(model, config)
    assert backend.graphs == made


def test_siblings_that_are_split() -> None:
    """A graph that runs a group's layers by one op is not for layers on their own."""
    model, (backend, config) = other(128, 0), counting()
    before = assert_as_uncompiled(model, config)
    made = backend.graphs
    group: Any = model.model.layers[0].self_attn.q_proj._group
    group.split(range(3))
    assert torch.allclose(assert_as_uncompiled(model, config), before, atol=1e-4)
    assert backend.graphs == 2 * made


def test_everything_of_a_wrapper_is_compared() -> None:
    """Also what is added to wrappers later: an attribute of which nothing is known leaves all guards in place."""
    model = other(128, 0)
    known = insides(model)
    assert known is not None and known == insides(model)
    wrapper: Any = next(module for module in model.modules() if isinstance(module, LoraLayer))
    held = wrapper.__dict__
    for name, value in list(held.items()):
        if name in ("_op", "_group", "_routing", "base_layer", "_path", "_scattered", "training"):
            held[name] = copy.copy(value) if name in ("_op", "_routing", "base_layer") else "another"
            if name == "_group":
                held[name] = type("Group", (), {"trusted": True})()
            assert insides(model) != known, name
            held[name] = value
    assert insides(model) == known
    held["table"] = {}
    assert insides(model) is None
    del held["table"]
    wrapper.weight = torch.nn.Parameter(wrapper.weight.detach().t())
    assert insides(model) not in (known, None)


def test_settings_are_compared_as_transformers_does() -> None:
    model = other(128, 0)
    pairs = [counting(), counting(fullgraph=False)]
    for _ in range(6):
        for backend, config in pairs:
            logits(model, compile_config=copy.copy(config))
            assert backend.graphs == 1
            assert model._last_compile_config == config
            assert model._compiled_call._torchdynamo_orig_callable == model.__call__
    for _ in range(MAX_KEPT + 1):
        logits(model, compile_config=counting()[1])
    assert len(model.multilora.calls.steps._kept) == MAX_KEPT


def test_reset() -> None:
    model, (backend, config) = other(128, 0), counting()
    want = logits(model, compile_config=config)
    torch.compiler.reset()
    assert torch.equal(logits(model, compile_config=config), want)
    assert backend.graphs == 2


def test_modes_become_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile takes a mode or options; a user's own options, and filter, count."""
    asked: list[dict[str, Any]] = []

    def compile(model: Any, **settings: Any) -> Any:  # noqa: A001
        asked.append(settings)
        run = lambda *args, **kwargs: model(*args, **kwargs)  # noqa: E731
        run._torchdynamo_orig_callable = model  # type: ignore[attr-defined]
        return run

    monkeypatch.setattr(torch, "compile", compile)

    def asked_for(**settings: Any) -> list[dict[str, Any]]:
        asked.clear()
        config = CompileConfig(**settings)
        config._compile_all_devices = True
        logits(other(128, 0), compile_config=config)
        return asked

    plain, ours = asked_for()
    assert plain == {
        "fullgraph": False,
        "dynamic": None,
        "backend": "inductor",
        "mode": "reduce-overhead",
        "options": None,
    }
    assert ours.pop("options").keys() == {"triton.cudagraphs", "guard_filter_fn"}
    assert ours == {"fullgraph": False, "dynamic": None, "backend": "inductor"}
    _, ours = asked_for(mode=None, options={"max_autotune": True}, dynamic=True)
    assert ours["options"].pop("guard_filter_fn") and ours["options"] == {"max_autotune": True} and ours["dynamic"]
    assert len(asked_for(backend="eager", mode="default")) == 2
    assert len(asked_for(backend="eager", mode="reduce-overhead")) == 1, "a mode that its backend may know"
    assert len(asked_for(mode=None, options={"freezing": True})) == 1, "weights would be part of the graph"


def test_a_users_own_filter_counts() -> None:
    model, seen = other(128, 0), []

    def users(entries: Sequence[Any]) -> list[bool]:
        seen.append(len(entries))
        return ["input_layernorm" not in str(entry.name) for entry in entries]

    logits(model, compile_config=counting(options={"guard_filter_fn": users})[1])
    found = guards(model)
    assert seen and not any("input_layernorm" in line or "_proj'" in line for line in found)
    assert any("post_attention_layernorm" in line for line in found)


def test_others_get_all_guards() -> None:
    """A call that somebody asks for outside of generate() may be kept over changes that nobody would look for."""
    model, (_, config) = other(128, 0), counting()
    logits(model, compile_config=config)
    compiled = model.get_compiled_call(config)
    assert model._compiled_call in compiled.args


def test_a_copy_has_graphs_of_its_own_and_old_ones_go(tmp_path: Any) -> None:
    model, (backend, config) = other(128, 0), counting()
    want = assert_as_uncompiled(model, config)
    made = backend.graphs
    model.save_pretrained(tmp_path)
    twin = copy.deepcopy(model)
    assert not twin.multilora.calls.steps._kept
    assert torch.equal(assert_as_uncompiled(twin, config), want)
    assert backend.graphs == 2 * made
    compiled = weakref.ref(model.multilora.calls.steps._kept[-1][2])
    disable_multilora(model)
    gc.collect()
    assert compiled() is None


def keys_of(cache: Any) -> list[int]:
    return [layer.keys.data_ptr() for layer in cache.layers]


def test_a_cache_is_given_the_tensors_of_the_one_before() -> None:
    """A CUDA graph is recorded anew where they lie elsewhere. What somebody holds is nobody else's."""
    model, (_, config) = enabled("llama", ["r8", "r3"]), counting()
    asked = {**prompts(3), **SETTINGS, "compile_config": config, "return_dict_in_generate": True}
    want = logits(model, disable_compile=True)
    held = model.generate(**asked, adapter_ids=IDS).past_key_values
    first, before = keys_of(held), [layer.keys.clone() for layer in held.layers]
    other = model.generate(**asked, adapter_ids=["r3", None, None]).past_key_values
    assert not set(keys_of(other)) & set(first)
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(held.layers, before, strict=True))
    second = keys_of(other)
    del other
    for ids in (IDS, None, IDS):
        gc.collect()  # what is compiled is held in cycles for a while
        found = model.generate(**asked, adapter_ids=ids, output_logits=True)
        assert keys_of(found.past_key_values) == second, "those that nobody held"
        got = torch.stack(found.logits)
        del found
    assert relative_error(got, want) <= 1e-4
    disable_multilora(model)
    assert keys_of(held) == first


def test_one_set_of_tensors_is_kept() -> None:
    model, (_, config) = enabled("llama", ["r8", "r3"]), counting()
    caches = model.multilora.calls.steps.caches
    for rows in (3, 2, 3):
        asked = {name: tensor[:rows] for name, tensor in prompts(3).items()}
        model.generate(**asked, **SETTINGS, adapter_ids="r8", compile_config=config)
        gc.collect()
        caches.sweep()
        assert len(caches._kept) == 1
    model.generate(**prompts(3), **SETTINGS, adapter_ids="r8", disable_compile=True)
    assert len(caches._kept) == 1
    model.multilora.calls.steps.clear()
    assert not caches._kept
