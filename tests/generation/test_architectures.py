"""Architectures beside the twelve of `models`, one for each odd way of being built: mixed batches against PEFT."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from models import PAD, VOCAB, prompts
from oracle import load_peft, make_adapter, relative_error
from transformers import PreTrainedModel

from hf_multilora import enable_multilora
from hf_multilora.errors import CacheMismatchError, MultiLoraError

TOKENS: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": None}
SMALL: dict[str, Any] = {
    **TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def deepseek_v3() -> PreTrainedModel:
    """Latent attention reads kv_b_proj; routed experts beside shared ones."""
    config = tf.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        v_head_dim=16,
        qk_nope_head_dim=8,
        first_k_dense_replace=1,
    )
    return tf.DeepseekV3ForCausalLM(config)


def qwen2_moe() -> PreTrainedModel:
    """The shared expert sees a flattened batch."""
    config = tf.Qwen2MoeConfig(
        **SMALL,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=40,
        decoder_sparse_step=1,
    )
    return tf.Qwen2MoeForCausalLM(config)


def qwen3_next() -> PreTrainedModel:
    """Linear attention beside full attention, and a cache for both."""
    config = tf.Qwen3NextConfig(
        **SMALL,
        head_dim=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention"],
    )
    return tf.Qwen3NextForCausalLM(config)


def gpt_oss() -> PreTrainedModel:
    config = tf.GptOssConfig(
        **SMALL,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
    )
    return tf.GptOssForCausalLM(config)


def lfm2() -> PreTrainedModel:
    return tf.Lfm2ForCausalLM(tf.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]))


def mamba() -> PreTrainedModel:
    return tf.MambaForCausalLM(tf.MambaConfig(**TOKENS, hidden_size=48, num_hidden_layers=2, state_size=8))


def mamba2() -> PreTrainedModel:
    config = tf.Mamba2Config(
        **TOKENS, hidden_size=64, num_heads=8, head_dim=16, n_groups=2, num_hidden_layers=2, state_size=8
    )
    return tf.Mamba2ForCausalLM(config)


def bart() -> PreTrainedModel:
    """Positions in tables of a class of their own; the head is tied to the embedding of both halves."""
    config = tf.BartConfig(
        **{**TOKENS, "bos_token_id": 1},
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
        max_position_embeddings=64,
    )
    return tf.BartForConditionalGeneration(config)


def codegen() -> PreTrainedModel:
    """A qkv_proj that is not a plain concatenation: fused adapters fit it, split ones do not."""
    config = tf.CodeGenConfig(**TOKENS, n_embd=64, n_head=4, n_layer=2, rotary_dim=8, n_positions=64)
    return tf.CodeGenForCausalLM(config)


def whisper() -> PreTrainedModel:
    config = tf.WhisperConfig(
        **{**TOKENS, "bos_token_id": 1},
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=40,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return tf.WhisperForConditionalGeneration(config)


CASES: list[tuple[Callable[[], PreTrainedModel], str | list[str]]] = [
    (deepseek_v3, r".*\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|embed_tokens)|lm_head"),
    (qwen2_moe, r".*(q_proj|shared_expert\.(gate_proj|up_proj|down_proj)|shared_expert_gate)"),
    (qwen3_next, r".*\.(q_proj|in_proj_qkvz|in_proj_ba|out_proj|shared_expert_gate|embed_tokens)|lm_head"),
    (gpt_oss, ["q_proj", "k_proj", "v_proj", "o_proj"]),
    (lfm2, ["in_proj", "out_proj", "q_proj", "w1", "w2", "embed_tokens"]),
    (mamba, ["in_proj", "embeddings", "lm_head"]),
    (mamba2, ["in_proj", "embeddings", "lm_head"]),
    (bart, ["q_proj", "v_proj", "fc1", "fc2", "out_proj", "embed_tokens", "lm_head"]),
    (codegen, ["qkv_proj", "fc_in", "wte", "lm_head"]),
    (whisper, ["q_proj", "v_proj", "fc1", "embed_tokens", "proj_out"]),
]


@pytest.fixture(scope="module", params=CASES, ids=[case[0].__name__ for case in CASES])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(bare model, PEFT's model, enabled model with PEFT's adapter as "a" and another as "b")."""
    make, targets = request.param
    folder = tmp_path_factory.mktemp(make.__name__)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        base = make().eval()
        with torch.no_grad():
            for parameter in base.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.15)
    base.generation_config.eos_token_id = None
    base.generation_config.pad_token_id = PAD
    options = {"task_type": None, "lora_dropout": 0.0, "target_modules": targets}
    model = enable_multilora(copy.deepcopy(base), max_lora_rank=8)
    for seed, (name, rank) in enumerate((("a", 4), ("b", 7))):
        model.load_adapter(make_adapter(base, folder / name, seed, r=rank, **options), adapter_name=name)
    # The transformers model inside, with PEFT's layers: PeftModel's own forward wants input_ids, Whisper has none.
    return base, load_peft(base, folder / "a").base_model.model, model


def inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    if model.config.model_type == "whisper":
        return {"input_features": torch.randn(3, 8, 40, generator=torch.Generator().manual_seed(1))}
    return prompts(3, side=None)


def test_forward(served: Any) -> None:
    base, peft, model = served
    given = inputs(base)
    if base.config.is_encoder_decoder:
        given["decoder_input_ids"] = prompts(3, side=None, length=5)["input_ids"]
    with torch.no_grad():
        got = model(**given, adapter_ids=["a", None, "b"]).logits
        want, bare = peft(**given).logits, base(**given).logits
        assert torch.equal(model(**given).logits, bare)
    assert relative_error(want[0], bare[0]) > 0.05
    assert relative_error(got[0], want[0]) <= 1e-5
    assert torch.equal(got[1], bare[1])


@pytest.mark.parametrize("beams", [1, 2])
def test_generate(served: Any, beams: int) -> None:
    base, peft, model = served
    options = {"max_new_tokens": 5, "do_sample": False, "num_beams": beams}
    want, bare = peft.generate(**inputs(base), **options), base.generate(**inputs(base), **options)
    got = model.generate(**inputs(base), **options, adapter_ids=["a", None, "b"])
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], bare[1])
    assert torch.equal(model.generate(**inputs(base), **options, adapter_ids="a"), want)


def test_caches_are_tagged(served: Any) -> None:
    base, _, model = served
    if base.config.is_encoder_decoder:
        pytest.skip("test_cache_tag has these")
    ids = ["a", None, "b"]
    tokens = prompts(3, side=None)["input_ids"]
    with torch.no_grad():
        out = model(tokens[:, :-1], use_cache=True, adapter_ids=ids)
        names = [name for name in ("cache", "past_key_values", "cache_params") if getattr(out, name, None) is not None]
        cache = {names[0]: getattr(out, names[0])}
        with pytest.raises(CacheMismatchError):
            model(tokens[:, -1:], **copy.deepcopy(cache), adapter_ids=["b", None, "a"])
        with pytest.raises(CacheMismatchError):
            model(tokens[:, -1:], **copy.deepcopy(cache))
        got = model(tokens[:, -1:], **cache, adapter_ids=ids).logits[:, -1]
        want = model(tokens, adapter_ids=ids).logits[:, -1]
    assert relative_error(got, want) <= 1e-4


def test_weights_that_are_read_past_their_layer(tmp_path: Path) -> None:
    """Mamba's fast path reads x_proj.weight and never calls x_proj: the delta would be lost without a word."""
    base = mamba().eval()
    folder = make_adapter(base, tmp_path, 5, r=2, task_type=None, target_modules=["x_proj", "in_proj"])
    model = enable_multilora(base, max_lora_rank=8)
    with pytest.raises(MultiLoraError, match="x_proj"):
        model.load_adapter(folder, adapter_name="a")
