"""Layers that read the same x are served together: which ones, with which bits, and when not."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from enabled import enabled
from models import FAMILIES, HIDDEN, INNER, VOCAB, forward_inputs, prompts
from oracle import MIX, adapters, make_adapter, relative_error, rows_of
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_multilora import disable_multilora, enable_multilora
from hf_multilora.kernels.ops import LinearOp
from hf_multilora.layers.siblings import Group

NAMES = ["r8", "r3", "r64"]
IDS: list[Any] = ["r8", None, "r3", MIX]
QKV, GATED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def groups(model: nn.Module) -> list[tuple[str, tuple[str, ...]]]:
    """(parent's path, names of the members) of every group."""
    found: dict[int, Group] = {}
    for module in model.modules():
        group = module.__dict__.get("_group")
        if group is not None:
            assert group.members[module.__dict__["_place"]] is module
            found[id(group)] = group
    split = [[member._path.rpartition(".") for member in group.members] for group in found.values()]
    return sorted((parts[0][0], tuple(name for _, _, name in parts)) for parts in split)


def group_of(layer: nn.Module) -> Group:
    group = layer.__dict__["_group"]
    assert isinstance(group, Group)
    return group


def trusted(model: nn.Module) -> list[bool]:
    return [m.__dict__["_group"].trusted for m in model.modules() if m.__dict__.get("_group") is not None]


@contextmanager
def ungrouped() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_multilora.wrapped.form_groups", lambda wrappers, routing: None)
        yield


@contextmanager
def counted() -> Iterator[list[int]]:
    """Layers that each op served."""
    calls: list[int] = []
    real = LinearOp.__call__

    def call(self: LinearOp, ys: tuple[torch.Tensor, ...], *args: Any) -> tuple[torch.Tensor, ...]:
        calls.append(len(ys))
        return real(self, ys, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinearOp, "__call__", call)
        yield calls


@torch.no_grad()
def logits(model: Callable[..., Any], rows: int = 4, **options: Any) -> torch.Tensor:
    return model(**prompts(rows, side=None), use_cache=False, **options).logits


def mlp(model: PreTrainedModel) -> Any:
    return model.model.layers[0].mlp


def attention(model: PreTrainedModel) -> Any:
    return model.model.layers[0].self_attn


# Which layers.


def test_which_layers_are_siblings() -> None:
    for family in ("llama", "qwen3", "mistral", "gemma3", "llama_tied"):
        model = enable_multilora(FAMILIES[family].build())
        assert sorted(names for _, names in groups(model)) == [GATED] * 2 + [QKV] * 2, family
        assert all(trusted(model)), family
    assert {names for _, names in groups(enable_multilora(FAMILIES["opt"].build()))} == {
        ("k_proj", "v_proj", "q_proj")
    }
    for family in ("phi3", "gpt2", "neox", "falcon", "bloom"):
        assert groups(enable_multilora(FAMILIES[family].build())) == [], family
    t5 = enable_multilora(FAMILIES["t5"].build())
    assert [names for _, names in groups(t5)] == [("q", "k", "v")] * 6
    assert not any(trusted(t5)), "the source gives k and v another name for x than q"
    config = tf.BertConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=4, intermediate_size=INNER
    )
    assert [names for _, names in groups(enable_multilora(tf.BertModel(config).eval()))] == [("query", "key", "value")]


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["q_proj", "v_proj"], {("q_proj", "v_proj")}),
        (["q_proj", "o_proj", "down_proj", "up_proj"], set()),
        (["k_proj", "o_proj", "v_proj", "up_proj"], {("k_proj", "v_proj")}),
    ],
)
def test_siblings_among_the_targets(targets: list[str], expected: set[tuple[str, ...]]) -> None:
    model = enable_multilora(FAMILIES["llama"].build(), target_modules=targets)
    assert {names for _, names in groups(model)} == expected


class Parent(nn.Module):
    """These layers, in order."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


def test_where_groups_are_cut() -> None:
    """At most four slices; other widths of x and layers in between cut a group; a shared layer is in none."""
    model, shared = FAMILIES["llama"].build(), nn.Linear(8, 4)

    def lin(k: int = 8) -> nn.Linear:
        return nn.Linear(k, 4)

    model.model.layers[1].mlp = Parent(
        six=Parent(**{name: lin() for name in ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj")}),
        wide=Parent(gate_proj=lin(8), up_proj=lin(9)),
        between=Parent(w1=lin(), w2=lin(), w3=lin()),
        left=Parent(gate_proj=shared, up_proj=lin()),
        right=Parent(gate_proj=shared, up_proj=lin()),
        norm=Parent(wi_0=lin(), norm=nn.LayerNorm(4), wi_1=lin()),
        other=Parent(first=lin(), second=lin()),
    )
    enable_multilora(model)
    assert [(path.rpartition(".")[2], names) for path, names in groups(model) if "1.mlp" in path] == [
        ("norm", ("wi_0", "wi_1")),
        ("six", ("b_proj", "g_proj")),
        ("six", ("q_proj", "k_proj", "v_proj", "a_proj")),
    ]


# Bits.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3", "opt", "t5", "phi3"])
def test_bits_are_those_of_each_layer_alone(family: str, dtype: torch.dtype) -> None:
    bare = FAMILIES[family].build().to(dtype)
    model = enable_multilora(FAMILIES[family].build().to(dtype), max_lora_rank=128)
    with ungrouped():
        single = enable_multilora(FAMILIES[family].build().to(dtype), max_lora_rank=128)
    assert groups(single) == [] and (groups(model) or family == "phi3")
    for one in (model, single):
        for name in NAMES:
            one.load_adapter(adapters(family)[name], adapter_name=name)
    inputs = forward_inputs(FAMILIES[family], 4)
    for ids in (IDS, ["r64"] * 4, [None, None, "r3", None]):
        with torch.no_grad(), counted() as calls:
            got = model(**inputs, adapter_ids=ids).logits
        assert family == "phi3" or any(count > 1 for count in calls)
        with torch.no_grad():
            assert torch.equal(got, single(**inputs, adapter_ids=ids).logits)
            base = bare(**inputs).logits
        assert all(torch.equal(got[row], base[row]) for row in range(4) if ids[row] is None)
    options = {"max_new_tokens": 5, "do_sample": False, "adapter_ids": IDS}
    with counted() as calls:
        got = model.generate(**prompts(4), **options)
    assert torch.equal(got, single.generate(**prompts(4), **options))
    assert family == "phi3" or any(count > 1 for count in calls)


def test_one_op_for_a_group() -> None:
    model = enabled("llama", NAMES)
    with counted() as calls:
        logits(model, adapter_ids=["r8", None, "r8", None])
    assert sorted(calls) == [1, 1, 1, 1, 2, 2, 3, 3]
    with counted() as calls:
        model.load_adapter(adapters()["r1"], adapter_name="r1")  # q_proj only
        logits(model, adapter_ids=["r1", None, None, None])
    assert calls == [3, 3], "groups without an adapter run their base layers alone"
    with counted() as calls:
        logits(model)
    assert calls == []


def test_base_layers_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enabled("llama", NAMES)
    runs: list[nn.Module] = []
    real = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: (runs.append(self), real(self, x))[1])
    for _ in range(2):
        runs.clear()
        logits(model, adapter_ids=IDS)
        assert len(runs) == 15 and len({id(layer) for layer in runs}) == 15


def test_no_group_for_what_is_more_than_deltas() -> None:
    """Saved modules and rows that begin late take the path of each layer."""
    model = enabled("llama", NAMES)
    with counted() as calls, model.multilora.calls.open(["r8", "r3"], 2) as call:
        assert call.state is not None
        state = call.state.starting([0, 4], 12)
        with model.multilora.calls._published(call, state, 12), torch.no_grad():
            model.multilora._old_class.forward(model, **prompts(2, side=None), use_cache=False)
    assert set(calls) == {1} and len(calls) == 14


# Which layers read what is seen when they run.


def test_cross_attention_is_split() -> None:
    """q reads the decoder, k and v the encoder: they are a group of their own from then on."""
    model, inputs = enabled("t5", NAMES), forward_inputs(FAMILIES["t5"], 4)
    for _ in range(2):
        with torch.no_grad():
            got = model(**inputs, adapter_ids=IDS).logits
        want = rows_of("t5", IDS, lambda ref: ref(**inputs).logits.detach())
        for row in range(4):
            assert relative_error(got[row], want[row]) <= 1e-5
    found = groups(model)
    assert {names for path, names in found if "EncDec" in path} == {("k", "v")}
    assert {names for path, names in found if "SelfAttention" in path} == {("q", "k", "v")} and len(found) == 6
    assert all(group_of(m).proven for m in model.modules() if m.__dict__.get("_group") is not None)


def with_mlp(cls: type[LlamaMLP], **options: Any) -> PreTrainedModel:
    """A llama with MLPs of this class, enabled, with adapters."""
    model = FAMILIES["llama"].build()
    for layer in model.model.layers:
        layer.mlp.__class__ = cls
    enable_multilora(model, max_lora_rank=128, **options)
    for name in NAMES:
        model.load_adapter(adapters()[name], adapter_name=name)
    return model


def assert_like_single(cls: type[LlamaMLP], inference: bool = False) -> PreTrainedModel:
    """Three forwards equal those of a model without groups, to the bit; returns the model with groups."""
    model = with_mlp(cls)
    with ungrouped():
        single = with_mlp(cls)
    with torch.inference_mode(inference):
        for ids in (IDS, ["r3", "r64", None, "r8"], IDS):
            assert torch.equal(logits(model, adapter_ids=ids), logits(single, adapter_ids=ids))
    assert model.multilora._routing.open is None
    return model


class Reversed(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up_proj(x)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


class Twice(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) + self.gate_proj(x))


class Changed(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        gate = self.act_fn(self.gate_proj(x))
        x.mul_(0.5)
        return self.down_proj(gate * self.up_proj(x))


class Copied(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x.clone()))


class Flat(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)


class Chunked(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(Chunked, self).forward(part) for part in x.split(5, dim=1)], dim=1)


class GatesFirst(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.split(6, dim=1)
        gates = [self.act_fn(self.gate_proj(part)) for part in (a, b)]
        ups = [self.up_proj(part) for part in (a, b)]
        return torch.cat([self.down_proj(gate * up) for gate, up in zip(gates, ups, strict=True)], dim=1)


@pytest.mark.parametrize(
    ("cls", "kept"),
    [(Reversed, True), (Flat, True), (Chunked, True)]
    + [(Twice, False), (Changed, False), (Copied, False), (GatesFirst, False)],
)
def test_ways_to_call_a_pair(cls: type[LlamaMLP], kept: bool) -> None:
    model = assert_like_single(cls)
    group = mlp(model).gate_proj.__dict__["_group"]
    assert group.proven if kept else group is None
    assert attention(model).q_proj.__dict__["_group"] is not None, "the others stay"


class Steered(LlamaMLP):
    """Other ways to write it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.act_fn(self.gate_proj(x))
        x[..., 0] += 3
        return self.down_proj(gate * self.up_proj(x))


@pytest.mark.parametrize("cls", [LlamaMLP, Reversed, Copied, Changed, Steered])
def test_inference_mode(cls: type[LlamaMLP]) -> None:
    assert_like_single(cls, inference=True)


class LeavesOut(LlamaMLP):
    """Calls the second of the pair only if it is told to."""

    everything = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.act_fn(self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x) if self.everything else gate)


def test_a_layer_that_is_left_out() -> None:
    """Once is no reason to split, again and again is; the last group of a forward is seen when the forward ends."""
    model = with_mlp(LeavesOut)
    model.model.layers[0].mlp.everything = True  # its group would be found out earlier: when the next one leads
    last = model.model.layers[1].mlp
    for everything in (False, True, False, False):
        last.everything = everything
        logits(model, adapter_ids=IDS)
        assert model.multilora._routing.open is None and group_of(last.gate_proj)
    logits(model, adapter_ids=IDS)
    assert last.gate_proj.__dict__["_group"] is None and group_of(mlp(model).gate_proj).proven


def test_no_tensor_outlives_a_forward() -> None:
    model = with_mlp(LeavesOut)
    seen: list[weakref.ref[torch.Tensor]] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: seen.append(weakref.ref(args[0])))
    logits(model, adapter_ids=IDS)
    gc.collect()
    assert len(seen) == 2 and all(ref() is None for ref in seen)


def test_an_exception_between_siblings() -> None:
    model, seen = enabled("llama", NAMES), []
    want = logits(model, adapter_ids=IDS)

    def fail(module: nn.Module, args: tuple[torch.Tensor]) -> None:
        seen.append(weakref.ref(args[0]))
        raise RuntimeError("between")

    for number in range(5):
        hook = attention(model).v_proj.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="between"):
            logits(model, adapter_ids=IDS)
        assert model.multilora._routing.open is None and group_of(attention(model).q_proj)
        hook.remove()
        gc.collect()
        assert seen[-1]() is None
        assert torch.equal(logits(model, adapter_ids=["r8", None, "r3", "r64"])[:3], want[:3]), number
    assert group_of(attention(model).q_proj).members[2] is attention(model).v_proj


# What others do to the layers.


def test_hooks_of_users() -> None:
    """Hooks run where they hang: on the input of one sibling alone, on the output of another."""

    def prepare(model: PreTrainedModel) -> PreTrainedModel:
        attention(model).k_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        attention(model).v_proj.register_forward_hook(lambda module, args, output: output + 1)
        mlp(model).up_proj.register_forward_hook(lambda module, args, output: output * 2)
        return model

    model = prepare(enabled("llama", NAMES))
    with ungrouped():
        single = prepare(enabled("llama", NAMES))
    bare = prepare(FAMILIES["llama"].build())
    for _ in range(2):
        got = logits(model, adapter_ids=IDS)
        assert torch.equal(got, logits(single, adapter_ids=IDS)) and torch.equal(got[1], logits(bare)[1])
    assert len(group_of(mlp(model).up_proj).members) == 2
    assert [names for path, names in groups(model) if path.endswith("0.self_attn")] == [], "q, then k, then v"


def steered(model: PreTrainedModel) -> PreTrainedModel:
    """Hooks that change x in place, between siblings."""

    def before(module: nn.Module, args: Any) -> None:
        args[0].mul_(2)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        args[0].add_(1)

    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_pre_hook(before)
        layer.self_attn.q_proj.register_forward_hook(after)
    return model


@pytest.mark.parametrize("inference", [False, True])
def test_hooks_that_change_x(inference: bool) -> None:
    """Tensors have no version under inference_mode, so that layers with hooks are on their own there."""
    model = steered(enabled("llama", NAMES))
    with ungrouped():
        single = steered(enabled("llama", NAMES))
    with torch.inference_mode(inference):
        for _ in range(2):
            assert torch.equal(logits(model, adapter_ids=IDS), logits(single, adapter_ids=IDS))


@pytest.mark.parametrize("before", [True, False])
def test_accelerate_hooks(before: bool) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    def hook(model: PreTrainedModel) -> None:
        add_hook_to_module(attention(model).k_proj, AlignDevicesHook(execution_device="cpu", offload=True))

    want = logits(enabled("llama", NAMES), adapter_ids=IDS)
    model = FAMILIES["llama"].build()
    if before:
        hook(model)
    enable_multilora(model, max_lora_rank=128)
    for name in NAMES:
        model.load_adapter(adapters()[name], adapter_name=name)
    if not before:
        logits(model, adapter_ids=IDS)
        hook(model)
    assert attention(model).k_proj.weight.device.type == "meta"
    for _ in range(2):
        assert torch.equal(logits(model, adapter_ids=IDS), want)
    assert len([names for _, names in groups(model) if names == QKV]) == (1 if before else 2)


class Tupled(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None


class TakesTuples(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)[0])


def test_a_sibling_with_another_kind_of_output(tmp_path: Path) -> None:
    """The adapter leaves it alone, so that it must not be in the way of the other one."""
    folder = make_adapter(FAMILIES["llama"].build(), tmp_path, 5, r=4, target_modules=["gate_proj"])
    model, plain = FAMILIES["llama"].build(), FAMILIES["llama"].build()
    for layer in model.model.layers:
        layer.mlp.__class__, layer.mlp.up_proj.__class__ = TakesTuples, Tupled
    for one in (model, plain):
        enable_multilora(one, max_lora_rank=128)
        one.load_adapter(folder, adapter_name="gate")
    assert group_of(mlp(model).gate_proj)
    ids = ["gate", None, None, "gate"]
    for _ in range(2):
        assert torch.equal(logits(model, adapter_ids=ids), logits(plain, adapter_ids=ids))
    assert mlp(model).gate_proj.__dict__["_group"] is None and group_of(mlp(plain).gate_proj).proven


def test_disable_and_copies() -> None:
    model = enabled("llama", NAMES)
    want = logits(model, adapter_ids=IDS)
    twin = copy.deepcopy(model)
    assert groups(twin) == groups(model) != []
    assert not {id(group_of(m)) for m in twin.modules() if m.__dict__.get("_group")} & {
        id(group_of(m)) for m in model.modules() if m.__dict__.get("_group")
    }
    assert torch.equal(logits(twin, adapter_ids=IDS), want)
    op = weakref.ref(group_of(attention(model).q_proj).op)
    disable_multilora(model)
    assert not any({"_group", "_place"} & set(m.__dict__) for m in model.modules())
    gc.collect()
    assert op() is None
    assert torch.equal(logits(twin, adapter_ids=IDS), want)


def test_moved_models_have_groups_over_the_new_slots() -> None:
    model = enabled("llama", NAMES)
    model.to(torch.bfloat16)
    assert {group_of(m).op.data.dtype for m in model.modules() if m.__dict__.get("_group")} == {torch.bfloat16}
    with counted() as calls:
        logits(model, adapter_ids=IDS)
    assert sorted(calls) == [1] * 4 + [2, 2, 3, 3]


# Two steps.


def test_overlap_begins_before_the_base_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enabled("llama", NAMES)
    want = logits(model, adapter_ids=IDS)
    order: list[str] = []
    begin, end, linear = LinearOp.begin, LinearOp.end, nn.Linear.forward
    monkeypatch.setattr(LinearOp, "begin", lambda self, *a: (order.append("begin"), begin(self, *a))[1])
    monkeypatch.setattr(LinearOp, "end", lambda self, *a: (order.append(f"end {len(a[0])}"), end(self, *a))[1])
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: (order.append("base"), linear(self, x))[1])
    monkeypatch.setattr(model.multilora._routing, "overlap", True)
    assert torch.equal(logits(model, adapter_ids=IDS), want)
    one = ["begin", "base", "end 1"]
    layer = ["begin", "base", "base", "base", "end 3", *one, "begin", "base", "base", "end 2", *one]
    assert order == [*layer, *layer, "base"], "the head has no adapter here"


# Compiled forwards.


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Recorder:
    """Runs graphs as they are, and keeps the order of what they call."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        names = []
        for node in graph.graph.nodes:
            if "hf_multilora.lora_expand_" in str(node.target):
                names.append(f"expand_ {len(node.args[0])}")
            elif getattr(node.target, "__name__", "") == "linear":
                names.append("base")
        self.graphs.append(names)
        return graph.forward


def assert_compiled(model: PreTrainedModel, family: str, backend: Any, batches: list[list[Any]]) -> Any:
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for ids in batches:
        with model.multilora.use(ids):
            got = logits(compiled)
        want = rows_of(family, ids, logits)
        for row in range(len(ids)):
            assert relative_error(got[row], want[row]) <= 1e-5, (ids, row)
    assert model.multilora._routing.open is None
    return compiled


@pytest.mark.usefixtures("fresh_dynamo")
def test_one_op_for_a_group_in_a_graph() -> None:
    model, backend = enabled("llama", NAMES), Recorder()
    assert_compiled(model, "llama", backend, [IDS, ["r64", None, None, "r3"], [None, "r8", "r8", MIX]])
    one = ["base", "expand_ 1"]
    layer = ["base", "base", "base", "expand_ 3", *one, "base", "base", "expand_ 2", *one]
    assert backend.graphs == [[*layer, *layer, *one]]
    logits(model, adapter_ids=IDS)  # eager forwards in between change nothing that graphs depend on
    logits(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with model.multilora.use(IDS):
        logits(compiled)
    logits(compiled)
    assert len(backend.graphs) == 2 and backend.graphs[1] == ["base"] * 15


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compilers(backend: str) -> None:
    model = enabled("llama", NAMES)
    compiled = assert_compiled(model, "llama", backend, [IDS, ["r3", "r64", None, None]])
    with model.multilora.use(IDS), torch.inference_mode():
        assert relative_error(logits(compiled)[0], logits(model, adapter_ids=IDS)[0]) <= 1e-5


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_groups_are_trusted_or_proven() -> None:
    """T5's source does not say that k and v read what q reads: compiled forwards wait for an eager one to show it."""
    model, inputs = enabled("t5", NAMES), forward_inputs(FAMILIES["t5"], 4)

    def run(fn: Callable[..., Any]) -> torch.Tensor:
        with torch.no_grad():
            return fn(**inputs, use_cache=False).logits

    want = rows_of("t5", IDS, run)
    for expected in ({"expand_ 1"}, {"expand_ 1", "expand_ 2", "expand_ 3"}):
        torch.compiler.reset()
        backend = Recorder()
        with model.multilora.use(IDS):
            got = run(torch.compile(model, fullgraph=True, backend=backend))
        assert relative_error(got, want) <= 1e-5
        assert {name for name in backend.graphs[0] if "expand" in name} == expected
        assert relative_error(run(lambda **inputs: model(adapter_ids=IDS, **inputs)), want) <= 1e-5


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("source", [True, False])
def test_compiled_forwards_that_are_patched(monkeypatch: pytest.MonkeyPatch, source: bool) -> None:
    """The class's source says nothing of them, and they may have none."""
    forward: Any = Changed.forward
    if not source:
        code = "def forward(self, x):\n x = x.clone()\n gate = self.act_fn(self.gate_proj(x))\n x.mul_(0.5)\n"
        names: dict[str, Any] = {}
        exec(code + " return self.down_proj(gate * self.up_proj(x))", names)
        forward = names["forward"]
    monkeypatch.setattr(LlamaMLP, "forward", forward)
    model = enabled("llama", NAMES)
    assert not group_of(mlp(model).up_proj).trusted and group_of(attention(model).q_proj).trusted
    with ungrouped():
        single = enabled("llama", NAMES)
    with model.multilora.use(IDS):
        got = logits(torch.compile(model, fullgraph=True, backend="eager"))
    assert relative_error(got, logits(single, adapter_ids=IDS)) <= 1e-5
    with torch.inference_mode():
        assert torch.equal(logits(model, adapter_ids=IDS), logits(single, adapter_ids=IDS))


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_hooks_that_change_x() -> None:
    model, backend = steered(enabled("llama", NAMES)), Recorder()
    with ungrouped():
        single = steered(enabled("llama", NAMES))
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(2):
        with model.multilora.use(IDS):
            got = logits(compiled)
        assert relative_error(got, logits(single, adapter_ids=IDS)) <= 1e-5
    assert len(backend.graphs) == 1 and {name for name in backend.graphs[0] if "expand" in name} == {"expand_ 1"}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("cls", [Reversed, Copied, Twice, GatesFirst, LeavesOut, Changed, Steered])
def test_compiled_ways_to_call_a_pair(cls: type[LlamaMLP]) -> None:
    model, backend = with_mlp(cls), Recorder()
    with ungrouped():
        single = with_mlp(cls)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(4):
        with model.multilora.use(IDS):
            got = logits(compiled)
        assert relative_error(got, logits(single, adapter_ids=IDS)) <= 1e-5
    assert len(backend.graphs) <= 2
    assert torch.equal(logits(model, adapter_ids=IDS), logits(single, adapter_ids=IDS))
    assert model.multilora._routing.open is None
