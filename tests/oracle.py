"""PEFT as the definition: adapters made and saved by it, and its answer for one adapter at a time.

Every adapter is loaded by PeftModel.from_pretrained into a model of its own, so that nothing which PEFT writes into a
base for one adapter can reach another's reference.
"""

from __future__ import annotations

import atexit
import copy
import math
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from models import BUILDS, Family
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

TOLERANCE = 1e-5  # ||difference|| / ||reference|| of a row's logits in fp32
MIX = {"r3": 0.7, "r8": -0.4}  # PEFT takes use_rslora from the first adapter, so that must be one without it

Id = str | None | Mapping[str, float]


def specs(family: Family) -> dict[str, dict[str, Any]]:
    """LoraConfig options by adapter name: ranks 1 to 64, and each way of choosing rank, scaling and modules."""
    attention, mlp = list(family.attention), list(family.mlp)
    second = rf".*{family.layer}\..*{family.attention[0]}".replace("attn.c_attn", r"attn\.c_attn")
    return {
        "r1": {"r": 1, "lora_alpha": 2, "target_modules": attention[:1]},
        "r3": {"r": 3, "lora_alpha": 6, "target_modules": attention + mlp + list(family.embedding)},
        "r8": {"r": 8, "lora_alpha": 4, "use_rslora": True, "target_modules": attention + mlp},
        "r16": {
            "r": 16,
            "lora_alpha": 16,
            "target_modules": "all-linear",
            "rank_pattern": {second: 5, mlp[-1]: 2},
            "alpha_pattern": {mlp[-1]: 7},
        },
        "r33": {"r": 33, "lora_alpha": 20, "target_modules": [*mlp, family.head]},
        "r64": {"r": 64, "lora_alpha": 64, "target_modules": [*attention, *mlp, *family.embedding, family.head]},
    }


@cache
def workspace() -> Path:
    """A folder for this process's adapters, removed at its end."""
    folder = Path(tempfile.mkdtemp(prefix="multilora-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Give every LoRA factor random non-zero values, so that its delta is about a third of the layer's output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "lora_" not in path or "magnitude" in path:
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if "lora_embedding_A" in path or parameter.dim() == 1:
                parameter.copy_(noise * 0.3)
            elif "lora_A" in path:
                parameter.copy_(noise / math.sqrt(parameter.shape[1]))
            else:
                parameter.copy_(noise * 0.3 / math.sqrt(parameter.shape[1]))


def make_adapter(base: PreTrainedModel, folder: Path, seed: int, *, save: Mapping[str, Any] = {}, **lora: Any) -> Path:
    """Save a random adapter for `base` as PEFT saves one; `lora` are LoraConfig's options. Returns the folder."""
    lora = {"lora_dropout": 0.1, "task_type": "CAUSAL_LM", **lora}
    if base.config.is_encoder_decoder:
        lora["task_type"] = "SEQ_2_SEQ_LM"
    with warnings.catch_warnings():  # tied embeddings, shipped base weights: wanted here
        warnings.simplefilter("ignore")
        model = get_peft_model(copy.deepcopy(base), LoraConfig(**lora))
        randomize(model, seed)
        model.save_pretrained(folder, **save)
    return folder


@cache
def adapters(family: str = "llama") -> dict[str, Path]:
    """The folders of one family's adapters, by the names of `specs`."""
    base = BUILDS[family].build()
    return {
        name: make_adapter(base, workspace() / family / name, seed, **spec)
        for seed, (name, spec) in enumerate(specs(BUILDS[family]).items())
    }


def load_peft(base: PreTrainedModel, folder: Path) -> PeftModel:
    """PEFT with this one adapter, on a copy of `base`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()


def mix_peft(base: PreTrainedModel, parts: Sequence[tuple[Path, float]]) -> PeftModel:
    """PEFT with a weighted mix of adapters, made by add_weighted_adapter("cat"), on a copy of `base`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(copy.deepcopy(base), parts[0][0], adapter_name="part0")
        for number, (folder, _) in enumerate(parts[1:], start=1):
            model.load_adapter(folder, adapter_name=f"part{number}")
        names = [f"part{number}" for number in range(len(parts))]
        weights = [weight for _, weight in parts]
        model.add_weighted_adapter(names, weights, adapter_name="mix", combination_type="cat")
        model.set_adapter("mix")
    return model.eval()


@cache
def _alone(family: str, key: str | tuple[tuple[str, float], ...] | None) -> PreTrainedModel | PeftModel:
    base = BUILDS[family].build()
    if key is None:
        return base
    folders = adapters(family)
    if isinstance(key, str):
        return load_peft(base, folders[key])
    return mix_peft(base, [(folders[name], weight) for name, weight in key])


def alone(family: str, adapter: Id) -> PreTrainedModel | PeftModel:
    """The reference of one row: PEFT with that adapter (or mix) only, or the bare model for None. Do not change it."""
    return _alone(family, tuple(adapter.items()) if isinstance(adapter, Mapping) else adapter)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||, in float64; inf where shapes differ."""
    if got.shape != want.shape:
        return math.inf
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm()).item()


def assert_row(got: torch.Tensor, want: torch.Tensor, adapter: Id, where: str = "") -> None:
    """One row's logits against its reference: within the tolerance, and the very bits for a base row."""
    error = relative_error(got, want)
    assert error <= TOLERANCE, f"{where} {adapter}: relative error {error:.2e}"
    if adapter is None:
        assert torch.equal(got, want), f"{where}: a base row is not bit-equal to the bare model"


def rows_of(family: str, ids: Sequence[Id], call: Callable[[Any], torch.Tensor], per_row: int = 1) -> torch.Tensor:
    """What PEFT gives for a batch of mixed `ids`: `call` runs once for each distinct id on its reference model, with
    the whole batch, and each row is taken from the run of its own id. `per_row`: rows of the result for each id."""
    results: dict[str, torch.Tensor] = {}
    rows = []
    for row, adapter in enumerate(ids):
        key = repr(adapter)
        if key not in results:
            results[key] = call(alone(family, adapter))
        rows.append(results[key][row * per_row : (row + 1) * per_row])
    return torch.cat(rows)
