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
# # Memory and speed
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hf-multilora/hf_multilora/blob/main/notebooks/03_memory_and_speed.ipynb)
#
# Slots on the device hold the adapters that a batch uses; all others wait in host memory. This notebook shows what slots
# cost, what happens when a batch names more adapters than there are slots, and what a mixed batch costs on your machine.

# %% [markdown]
# On Colab, run `%pip install "hf-multilora[notebooks] @ git+https://github.com/hf-multilora/hf_multilora"` in a cell of its own first. The
# first use fetches a small model, SmolLM2-135M-Instruct (93 MB), and converts it.

# %%
import warnings

warnings.filterwarnings("ignore")  # for a short page

# %%
import os
import time

import matplotlib.pyplot as plt
import torch
from IPython.display import SVG
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_multilora import disable_multilora, enable_multilora, estimate_memory
from hf_multilora.demo import ADAPTERS
from hf_multilora.demo.model import demo_model_path
from hf_multilora.demo.notebook import answers, chat

logging.set_verbosity_error()
logging.disable_progress_bar()

# %%
folder = demo_model_path()
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
model.config._name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"  # what it holds

# %% [markdown]
# ## What slots would take
# Nothing is allocated yet. `max_lora_rank` and `target_modules` decide what a slot has room for.

# %%
for options in ({}, {"max_lora_rank": 8}, {"max_lora_rank": 8, "target_modules": ["q_proj", "v_proj"]}):
    found = estimate_memory(model, max_loras=4, **options)
    print(f"{found['arena'] / 1e6:7.1f} MB for 4 slots with {options or 'the defaults'}")

# %% [markdown]
# ## More adapters than slots
# Two slots, and a batch with four adapters: it runs in waves. The rows come back in your order. (The four are copies of
# the demo's pirate.)

# %%
model = enable_multilora(model, max_loras=2, max_lora_rank=8)
pirate = os.path.relpath(ADAPTERS / "pirate")
reports = model.multilora.load_many({f"pirate-{i}": pirate for i in range(4)})
names = list(reports)

# %%
inputs = chat(tokenizer, ["Stop! The boy found the old map."] * len(names))
out = model.generate(**inputs, adapter_ids=names, max_new_tokens=6, do_sample=False)
set(answers(tokenizer, inputs, out))

# %% [markdown]
# `status()` has counted what was wanted at once, and says how many slots would have done it in one go.

# %%
model.multilora.status()

# %% [markdown]
# ## Pin and prefetch
# A pinned adapter keeps its slot. `prefetch` starts to bring one in while the device still computes.

# %%
model.multilora.pin("pirate-0")
model.multilora.prefetch(["pirate-3"])
{name: adapter.slot for name, adapter in model.multilora.adapters.items() if adapter.slot is not None}

# %%
model.multilora.unpin("pirate-0")

# %% [markdown]
# ## On your machine
# A batch of four rows, with more and more different adapters in it. 0: all rows are the base's.

# %%
model = enable_multilora(disable_multilora(model), max_loras=4, max_lora_rank=8)
model.multilora.load_many({name: pirate for name in names})


def seconds(distinct, tokens=6):
    ids = [names[i % distinct] if distinct else None for i in range(4)]
    start = time.perf_counter()
    model.generate(**inputs, adapter_ids=ids, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False)
    return time.perf_counter() - start


seconds(4, tokens=1)  # warm up, and bring all of them in
counts = [0, 1, 2, 4]
times = [min(seconds(count) for _ in range(2)) for count in counts]

# %%
figure, axes = plt.subplots(figsize=(5, 3))
axes.bar([str(count) for count in counts], times, color="tab:blue", width=0.6)
axes.set(xlabel="different adapters in the batch of 4", ylabel="seconds for 6 tokens a row")
plt.show()

# %% [markdown]
# ## On a GPU
# A model of 8 billion parameters on an NVIDIA H200, batch 32: what one decode step takes, against the number of different
# adapters in the batch. [The figures and how they were measured](../docs/speed.md).

# %%
figures = os.path.join("..", "docs", "figures")  # in a clone of the repository
there = os.path.isdir(figures)
SVG(filename=os.path.join(figures, "decode.svg")) if there else "see docs/figures/decode.svg"
