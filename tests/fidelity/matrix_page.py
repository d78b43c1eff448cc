"""docs/fidelity.md: which kinds of adapters are compared with PEFT on which families, from the tests' own parameters.

PYTHONPATH=. python tests/fidelity/matrix_page.py     # writes the page

A cell is a case of a test that runs in CI, so a tick that is wrong cannot stay there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "fidelity.md"
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE)]

import models  # noqa: E402
import oracle  # noqa: E402
import test_classification  # noqa: E402
import test_combinations  # noqa: E402
import test_matrix  # noqa: E402
from fidelity.bed import NAMES  # noqa: E402

TITLES = {
    "llama": "Llama", "llama_tied": "Llama, tied", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral",
    "gemma3": "Gemma 3", "gpt2": "GPT-2", "phi3": "Phi-3", "opt": "OPT", "neox": "GPT-NeoX", "falcon": "Falcon",
    "bloom": "BLOOM", "t5": "T5", "llama_cls": "Llama, sequences", "llama_tokens": "Llama, tokens",
    "bert_cls": "BERT, sequences", "bert_tokens": "BERT, tokens", "roberta_cls": "RoBERTa, sequences",
}  # fmt: skip
KINDS = {
    "plain": "LoRA on attention",
    "patterns": "rank and alpha patterns, rsLoRA",
    "dora": "DoRA",
    "dora_patterns": "DoRA with patterns, rsLoRA and the embedding",
    "lora_bias": "`lora_bias`",
    "bias_lora_only": '`bias="lora_only"`',
    "bias_all": '`bias="all"`',
    "norms": "norms in `modules_to_save`",
    "embedding": "LoRA on the embedding",
    "saved_embedding": "embedding in `modules_to_save`",
    "head": "LoRA on the head",
    "dora_head": "DoRA on the head",
    "saved_head": "head in `modules_to_save`",
    "tokens": "`trainable_token_indices`",
    "tokens_dict": "`trainable_token_indices` of embedding and head",
    "more_tokens_4": "4 added tokens",
    "more_tokens_7": "7 added tokens",
    "more_tokens_saved": "added tokens, embedding and head saved",
    "more_tokens_rows": "added tokens, only some rows trained",
    "tying": "`ensure_weight_tying`, LoRA",
    "tying_saved": "`ensure_weight_tying`, saved",
    "alora": "aLoRA",
    "alora_single": "aLoRA, one invocation token",
    "pissa": "PiSSA on a clean base",
    "olora": "OLoRA on a clean base",
    "gaussian": "gaussian init",
    "orthogonal": "orthogonal init",
    "eva": "EVA",
    "bdlora": "BD-LoRA",
    "monteclora": "MonteCLoRA",
    "velora": "VeLoRA",
    "five_labels": "a head with more labels",
    "two_labels": "a head with fewer labels, DoRA",
}

HEAD = f"""---
hide: [toc]
---

# Fidelity

PEFT is the definition: a row of a mixed batch gives what PEFT gives for that adapter alone in a batch of that shape.
The tests compare logits in fp32, ||difference|| / ||reference|| ≤ {oracle.TOLERANCE:g} for each row, and greedy tokens
and beams, which are to be the same. A base row has the bits of the bare model.

This page is made from the parameters of those tests (`python tests/fidelity/matrix_page.py`). ✓: a case that runs in
CI. "PEFT cannot": PEFT itself has no such adapter for that family. Empty: it does not exist there, as a head in an
encoder, or is not tested. Models are tiny, with random weights, and have two layers.
"""


def table(corner: str, columns: Iterable[str], rows: Mapping[str, Iterable[str]]) -> str:
    names = list(columns)
    lines = [f"| {' | '.join([corner, *names])} |", f"|---|{':---:|' * len(names)}"]
    return "\n".join(lines + [f"| {' | '.join([title, *cells])} |" for title, cells in rows.items()])


def kinds_table(families: Iterable[str], cases: Iterable[tuple[str, str]]) -> str:
    """One row for each kind, ticks where (family, kind) is a case."""
    families, tested = list(families), set(cases)
    kinds = [kind for kind in KINDS if any((family, kind) in tested for family in families)]
    unknown = {kind for _, kind in tested} - set(KINDS)
    if unknown:
        raise KeyError(f"Kinds without a title in {Path(__file__).name}: {', '.join(sorted(unknown))}")

    def cell(family: str, kind: str) -> str:
        if (family, kind) in tested:
            return "✓"
        return "PEFT cannot" if kind in NAMES[family].without else ""

    rows = {KINDS[kind]: [cell(family, kind) for family in families] for kind in kinds}
    return table("in one batch", [TITLES[family] for family in families], rows)


def ranks_table() -> str:
    said = {
        "r1": "one projection",
        "r3": "attention, MLP and embedding",
        "r8": "attention and MLP, rsLoRA",
        "r16": '`"all-linear"`, rank and alpha patterns',
        "r33": "MLP and head",
        "r64": "everything: attention, MLP, embedding, head",
    }
    families = list(models.FAMILIES.values())
    if set(said) != set(oracle.specs(families[0])):
        raise KeyError("The adapters of tests/oracle.py are others than those that this page describes.")
    rows = {
        f"rank {name[1:]}: {what}": ["✓" if name in oracle.specs(family) else "" for family in families]
        for name, what in said.items()
    }
    mix = " and ".join(f"{weight:g} x {name}" for name, weight in oracle.MIX.items())
    rows[f"a weighted mix, {mix}"] = ["✓"] * len(families)
    return table("in one batch", [TITLES[family.name] for family in families], rows)


def combinations_table() -> str:
    families = test_combinations.FAMILIES
    names = list(dict.fromkeys(name for _, name in test_combinations.CASES))

    def cell(family: str, name: str) -> str:
        if (family, name) in test_combinations.CASES:
            return "✓"
        refused = (family, name) in test_combinations.REFUSED_BY_PEFT
        return "PEFT cannot" if refused else "refused" if (family, name) in test_combinations.HALF_A_VOCABULARY else ""

    rows = {name.replace("_", " "): [cell(family, name) for family in families] for name in names}
    return table("several at once in one adapter", [TITLES[family] for family in families], rows)


def page() -> str:
    return "\n".join(
        [
            HEAD,
            "## Kinds of adapters\n\nAll kinds of a column are served in one batch, base rows between them "
            "(`tests/fidelity/test_matrix.py`).\n",
            kinds_table(test_matrix.FAMILIES, test_matrix.CASES),
            "\n## Classifiers\n\n`tests/fidelity/test_classification.py`.\n",
            kinds_table(test_classification.CLASSIFIERS, test_classification.CASES),
            "\n## Ranks and modules\n\nEight ids in one batch, with left, right and no padding "
            "(`tests/generation/test_families.py`).\n",
            ranks_table(),
            "\n## Combinations\n\n`tests/fidelity/test_combinations.py`. Refused: the file holds one of two tables "
            "that are not tied, the other one's new rows are nowhere.\n",
            combinations_table(),
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
