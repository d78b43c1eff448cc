"""Mixtures of experts, looked at from outside: families beside those of test_moe, PEFT as the oracle, odd calls."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from moe_bed import EXPERTS, HIDDEN, INNER, ROWS, VOCAB, adapters, bare, batch, enabled, logits, made, merged, three_d
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

from hf_multilora import disable_multilora, enable_multilora
from hf_multilora.errors import RoutingError

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip


def _granite() -> Any:
    config = tf.GraniteMoeConfig(**COMMON, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=2)
    return tf.GraniteMoeForCausalLM(config)


def _phimoe() -> Any:
    """Its router is a subclass of nn.Linear that returns a tuple."""
    config = tf.PhimoeConfig(**COMMON, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=2)
    return tf.PhimoeForCausalLM(config)


def _jamba() -> Any:
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0}
    routed = {"intermediate_size": INNER, "num_experts": EXPERTS, "num_experts_per_tok": 2}
    states = {"mamba_dt_rank": 4, "mamba_d_state": 8, "use_mamba_kernels": False}
    return tf.JambaForCausalLM(tf.JambaConfig(**COMMON, **layers, **routed, **states))


def _ernie() -> Any:
    routed = {"moe_num_experts": EXPERTS, "moe_intermediate_size": INNER, "moe_k": 2, "moe_num_shared_experts": 1}
    config = tf.Ernie4_5_MoeConfig(**COMMON, intermediate_size=44, **routed, moe_layer_start_index=0)
    return tf.Ernie4_5_MoeForCausalLM(config)


def _hunyuan() -> Any:
    """Its router is a module around nn.Linear."""
    routed = {"num_experts": EXPERTS, "moe_topk": 2, "num_shared_expert": 1}
    return tf.HunYuanMoEV1ForCausalLM(tf.HunYuanMoEV1Config(**COMMON, intermediate_size=INNER, head_dim=20, **routed))


def _nemotron_h() -> Any:
    """Experts without a gate, in a latent space of their own width."""
    routed = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": INNER, "n_shared_experts": 1}
    latent = {"moe_latent_size": 20, "moe_shared_expert_intermediate_size": 28, "n_group": 2, "topk_group": 1}
    config = tf.NemotronHConfig(**COMMON, head_dim=20, layer_types=["full_attention", "moe"], **routed, **latent)
    return tf.NemotronHForCausalLM(config)


def _aria() -> Any:
    routed = {"moe_num_experts": EXPERTS, "moe_topk": 2, "moe_num_shared_experts": 2}
    return tf.AriaTextForCausalLM(tf.AriaTextConfig(**COMMON, intermediate_size=INNER, **routed))


def _minimax_m2() -> Any:
    routed = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    return tf.MiniMaxM2ForCausalLM(tf.MiniMaxM2Config(**COMMON, intermediate_size=INNER, head_dim=20, **routed))


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "granitemoe": (_granite, "router"), "phimoe": (_phimoe, "router"), "jamba": (_jamba, "router"),
    "ernie4_5_moe": (_ernie, "gate"), "hunyuan_v1_moe": (_hunyuan, ""), "nemotron_h": (_nemotron_h, "gate"),
    "aria": (_aria, "router"), "minimax_m2": (_minimax_m2, "gate"),
}  # fmt: skip


def _randomised(model: Any) -> Any:
    generator = torch.Generator().manual_seed(11)
    for name, parameter in model.eval().requires_grad_(False).named_parameters():
        if parameter.dim() > 1:
            std = 0.5 if "embed" in name else 0.8 * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model


def _by_peft(base: Any, **options: Any) -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
    """(PEFT's model with random factors, its file, its config)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = get_peft_model(copy.deepcopy(base), LoraConfig(r=3, lora_alpha=6, **options)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    config = {k: sorted(v) if isinstance(v, set) else v for k, v in theirs.peft_config["default"].to_dict().items()}
    return theirs, dict(get_peft_model_state_dict(theirs)), {**config, "peft_version": peft.__version__}


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_are_what_peft_makes_of_them(family):
    build, router = OTHERS[family]
    base = _randomised(build())
    up = "up_proj" if family == "nemotron_h" else "gate_up_proj"
    parameters = [f"experts.{up}", "experts.down_proj", *([f"{router}.weight"] if router else ["gate.wg.weight"])]
    theirs, tensors, config = _by_peft(base, target_modules=["q_proj"], target_parameters=parameters)
    want, plain = logits(theirs, 5), logits(base, 5)
    model = enable_multilora(base, max_loras=2, max_lora_rank=8, slot_bytes=4 << 20)
    assert torch.equal(logits(model, 5), plain)
    model.multilora.load(tensors, "one", config=config)
    got = logits(model, 5, adapter_ids=["one", None] * 3 + ["one"])
    assert (want - plain)[0].abs().max() > 0.1
    for row in range(len(got)):
        kept = batch(5)["attention_mask"][row].bool()
        close = {"rtol": 1e-6, "atol": 2e-6} if row % 2 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(got[row][kept], (plain if row % 2 else want)[row][kept], **close)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4"])
@pytest.mark.parametrize("more", ["ranks", "up", "down"])
def test_what_peft_writes(family, more):
    """Patterns by the parameters' names with rsLoRA; one parameter alone."""
    names = ["experts.gate_up_proj", "experts.down_proj"]
    patterns = {"rank_pattern": {names[0]: 5}, "alpha_pattern": {names[1]: 7}, "use_rslora": True}
    chosen = {"ranks": names, "up": names[:1], "down": names[1:]}[more]
    options = {"target_modules": ["o_proj"], "target_parameters": chosen, **(patterns if more == "ranks" else {})}
    theirs, tensors, config = _by_peft(bare(family), **options)
    model = enable_multilora(bare(family), max_loras=2, max_lora_rank=8, slot_bytes=4 << 20)
    model.multilora.load(tensors, "one", config=config)
    got, want = logits(model, 4, adapter_ids=["one", None] * 3 + ["one"]), logits(theirs, 4)
    torch.testing.assert_close(got[::2], want[::2], rtol=1e-5, atol=1e-5)
    assert torch.equal(got[1], logits(bare(family), 4)[1])


@pytest.mark.parametrize("options", [{"num_beams": 3, "num_return_sequences": 2}, {"guidance_scale": 1.5}])
@pytest.mark.parametrize("family", ["qwen3_moe", "llama4"])
def test_rows_that_generate_repeats(family, options):
    """Beams, return sequences and guidance, prompts of one token among them."""
    options = {**options, "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    model, times = enabled(family), options.get("num_return_sequences", 1)
    for tokens in (1, 5):
        got = model.generate(**batch(tokens), **options, adapter_ids=ROWS)
        for name in ("3-D", "all", None):
            adapter = None if name is None else adapters(family)[name][0]
            want = merged(family, adapter).generate(**batch(tokens), **options)
            at = slice(times * ROWS.index(name), times * (ROWS.index(name) + 1))
            assert got[at].tolist() == want[at].tolist(), name


def test_waves_of_experts():
    options: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "adapter_ids": ROWS}
    want = enabled("qwen3_moe").generate(**batch(5), **options)
    assert torch.equal(enabled("qwen3_moe", max_loras=2).generate(**batch(5), **options), want)


def test_an_alora_beside_rows_of_experts():
    model = enabled("qwen3_moe", max_loras=6)
    tensors, config = three_d("qwen3_moe", made("qwen3_moe", 3, 9, "attention", "router"))
    config["alora_invocation_tokens"] = [int(batch(5)["input_ids"][3, 3])]
    model.multilora.load(tensors, "alora", config=config)
    rows = [*ROWS[:3], "alora", *ROWS[4:]]
    got, plain = logits(model, 5, adapter_ids=rows), logits(bare("qwen3_moe"), 5)
    want = logits(model, 5, adapter_ids=ROWS)
    keep = [row for row in range(len(rows)) if row != 3]
    assert torch.equal(got[keep], want[keep])
    assert torch.equal(got[3, :3], plain[3, :3]) and (got[3, 3:] - plain[3, 3:]).abs().max() > 0.1


def test_parts_called_by_themselves_in_a_block():
    model, block = enabled("qwen3_moe"), merged("qwen3_moe", adapters("qwen3_moe")["all"][0]).model.layers[0].mlp
    x, row = torch.randn(28, HIDDEN, generator=torch.Generator().manual_seed(1)), ROWS.index("all")
    mine, part = model.model.layers[0].mlp, slice(4 * row, 4 * row + 4)
    with torch.no_grad():
        _, weights, index = block.gate(x)
        with model.multilora.use(ROWS):
            own = mine.gate(x)[1]
            y = mine.experts(x, index, weights)
        torch.testing.assert_close(own[part], weights[part], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(y[part], block.experts(x, index, weights)[part], rtol=1e-5, atol=1e-5)
        plain = bare("qwen3_moe").model.layers[0].mlp.experts(x, index, weights)
        assert torch.equal(mine.experts(x, index, weights), plain)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_model_moves_to_half_precision(family):
    model, row = enabled(family).to(torch.bfloat16), ROWS.index("all")
    got, plain = logits(model, 4, adapter_ids=ROWS), logits(bare(family).to(torch.bfloat16), 4)
    want = logits(merged(family, adapters(family)["all"][0]).to(torch.bfloat16), 4)
    assert torch.equal(got[1], plain[1])
    effect = (want - plain)[row].abs().max()
    assert (got - want)[row].abs().max() < 0.05 * effect


def test_router_logits_are_those_of_the_rows():
    model, row = enabled("qwen3_moe"), ROWS.index("all")
    with torch.no_grad():
        got = model(**batch(4), adapter_ids=ROWS, output_router_logits=True).router_logits
        own = merged("qwen3_moe", adapters("qwen3_moe")["all"][0])
        want = own(**batch(4), output_router_logits=True).router_logits
    for mine, theirs in zip(got, want, strict=True):
        part = slice(4 * row, 4 * row + 4)
        torch.testing.assert_close(mine[part], theirs[part], rtol=1e-5, atol=1e-5)


def test_copies_and_a_second_life(tmp_path):
    model = enabled("qwen3_moe")
    want = logits(model, 4, adapter_ids=ROWS)
    assert model.state_dict().keys() == bare("qwen3_moe").state_dict().keys()
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin, 4, adapter_ids=ROWS), want)
    twin.set_experts_implementation("eager")
    assert model.model.layers[0].mlp.experts.config._experts_implementation == "batched_mm"
    model.save_pretrained(tmp_path)
    read = tf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    read.set_experts_implementation("batched_mm")
    assert torch.equal(logits(read, 4), logits(bare("qwen3_moe"), 4))
    disable_multilora(model)
    enable_multilora(model, max_loras=5, max_lora_rank=8, slot_bytes=4 << 20)
    for name, (_, (tensors, config)) in adapters("qwen3_moe").items():
        model.multilora.load(dict(tensors), name, config=config)
    assert torch.equal(logits(model, 4, adapter_ids=ROWS), want)


def _saving(family: str, what: str) -> tuple[Any, Any]:
    """(enabled model with an adapter "whole" that saves modules, the base with these tensors)."""
    generator, adapter = torch.Generator().manual_seed(5), made(family, 3, 1, "attention")
    tensors, config = three_d(family, adapter)
    own = merged(family, adapter)
    with torch.no_grad():
        for path, module in own.named_modules():
            if path.rpartition(".")[2] == what:
                for name, parameter in module.named_parameters(recurse=False):
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
                    tensors[f"base_model.model.{path}.{name}"] = parameter.clone()
    model = enable_multilora(bare(family), max_loras=4, max_lora_rank=8, slot_bytes=8 << 20)
    model.multilora.load(tensors, "whole", config={**config, "modules_to_save": [what]})
    return model, own


def _check_saved(family: str) -> None:
    model, own = _saving(family, "experts")
    tensors, config = adapters(family)["3-D"][1]
    model.multilora.load(dict(tensors), "3-D", config=config)
    rows = ["whole", None, "3-D", "whole", None, "whole", None]
    models = {"whole": own, None: bare(family), "3-D": merged(family, adapters(family)["3-D"][0])}
    for tokens in (4, 20):
        got = logits(model, tokens, adapter_ids=rows)
        for row, name in enumerate(rows):
            kept = batch(tokens)["attention_mask"][row].bool()
            want = logits(models[name], tokens)[row][kept]
            torch.testing.assert_close(got[row][kept], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4"])
def test_experts_saved_whole(family):
    _check_saved(family)


def test_a_subset_of_tokens_is_refused():
    """A block that is given some tokens of the batch, which no row can be told of."""
    model = enabled("qwen3_moe")
    block = model.model.layers[0].mlp.experts
    block.register_forward_pre_hook(lambda module, args: tuple(arg[: len(ROWS) + 1] for arg in args))
    with pytest.raises(RoutingError):
        logits(model, 4, adapter_ids=ROWS)
