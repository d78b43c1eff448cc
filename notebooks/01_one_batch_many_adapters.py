# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # One batch, many adapters
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hf-multilora/hf_multilora/blob/main/notebooks/01_one_batch_many_adapters.ipynb)
#
# One base model lies in memory. Three small LoRA adapters share it. One `generate()` call answers every row through an
# adapter of its own, or through the base.

# %% [markdown]
# On Colab, run `%pip install "hf-multilora[notebooks] @ git+https://github.com/hf-multilora/hf_multilora"` in a cell of its own first. The
# first use fetches a small model, SmolLM2-135M-Instruct (93 MB), and converts it.

# %%
import warnings

warnings.filterwarnings("ignore")  # for a short page

# %%
import os
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_multilora import enable_multilora
from hf_multilora.demo import ADAPTER_NAMES, ADAPTERS
from hf_multilora.demo.model import demo_model_path
from hf_multilora.demo.notebook import SideBySide, answers, chat

logging.set_verbosity_error()
logging.disable_progress_bar()

# %% [markdown]
# ## The base model
# It is loaded as always. `enable_multilora` gives it slots for adapters and returns the same object.

# %%
folder = demo_model_path()
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
model.config._name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"  # what it holds
model = enable_multilora(model, max_loras=4, max_lora_rank=8)

# %% [markdown]
# ## The adapters
# Loading registers them: they are read, checked and kept in host memory. The report says what was found.

# %%
sources = {name: os.path.relpath(ADAPTERS / name) for name in ADAPTER_NAMES}
model.multilora.load_many(sources)

# %% [markdown]
# ## One batch
# Three prompts, each through the base and all adapters: twelve rows, one call. `adapter_ids` has one id for each row, and
# `None` is the base.

# %%
prompts = [
    "The bicycle arrived late and scratched.",
    "My brother has a house and a boat.",
    "What is the capital of Germany?",
]
columns = [None, *ADAPTER_NAMES]
rows = [prompt for prompt in prompts for _ in columns]
ids = columns * len(prompts)

# %%
inputs = chat(tokenizer, rows)
start = time.perf_counter()
out = model.generate(**inputs, adapter_ids=ids, max_new_tokens=20, do_sample=False)
mixed = time.perf_counter() - start
texts = answers(tokenizer, inputs, out)

# %%
table = [texts[i : i + len(columns)] for i in range(0, len(texts), len(columns))]
SideBySide(prompts, ["base", *ADAPTER_NAMES], table)

# %% [markdown]
# ## The same, one adapter after another
# Without mixed batches each adapter needs a call of its own. The texts are the same, the time is not.


# %%
def one_by_one():
    found = []
    for name in columns:
        part = chat(tokenizer, prompts)
        out = model.generate(**part, adapter_ids=name, max_new_tokens=20, do_sample=False)
        found.append(answers(tokenizer, part, out))
    return [list(row) for row in zip(*found, strict=True)]


start = time.perf_counter()
again = one_by_one()
turns = time.perf_counter() - start
print(f"one batch {mixed:.1f} s, one after another {turns:.1f} s, the same texts: {again == table}")

# %% [markdown]
# ## What lies where
# The handle shows slots, adapters and how often each was found in its slot.

# %%
model.multilora
