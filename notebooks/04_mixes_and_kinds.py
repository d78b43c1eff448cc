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
# # Mixes, DoRA, aLoRA, and what a report tells
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hf-multilora/hf_multilora/blob/main/notebooks/04_mixes_and_kinds.ipynb)
#
# A row can name several adapters with weights. Rows with different kinds of adapters share a batch. The report of each
# adapter says what was found in its file.

# %% [markdown]
# On Colab, run `%pip install "hf-multilora[notebooks] @ git+https://github.com/hf-multilora/hf_multilora"` in a cell of its own first. The
# first use fetches a small model, SmolLM2-135M-Instruct (93 MB), and converts it.

# %%
import warnings

warnings.filterwarnings("ignore")  # for a short page

# %%
import json
import os

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_multilora import MultiLoraError, enable_multilora
from hf_multilora.demo import ADAPTERS
from hf_multilora.demo.model import demo_model_path
from hf_multilora.demo.notebook import SideBySide, answers, chat

logging.set_verbosity_error()
logging.disable_progress_bar()

# %%
folder = demo_model_path()
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
model.config._name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"  # what it holds
model = enable_multilora(model, max_loras=6, max_lora_rank=12)  # the ranks of a mix add up: 8 + 4

# %% [markdown]
# ## A report
# `modules` are the layers that it trained, with their ranks. `scaling` is what its product is multiplied by. Whatever has
# no effect, or was converted, is named; what cannot be served is an error, never left out.

# %%
pirate, as_json = (os.path.relpath(ADAPTERS / name) for name in ("pirate", "json"))
model.multilora.load(pirate, "pirate")

# %%
model.multilora.load(as_json, "json")

# %% [markdown]
# ## Mixes
# `{"pirate": 0.8, "json": 0.6}` on a row adds both adapters there, as PEFT's `add_weighted_adapter(combination_type="cat")`
# would. A mix takes one slot.

# %%
ids = ["pirate", {"pirate": 0.8, "json": 0.6}, {"pirate": 0.4, "json": 1.0}, "json"]
inputs = chat(tokenizer, ["Where is the old treasure?"] * len(ids))
out = model.generate(**inputs, adapter_ids=ids, max_new_tokens=20, do_sample=False)
SideBySide(["Where is the old treasure?"], list(map(str, ids)), [answers(tokenizer, inputs, out)])

# %% [markdown]
# ## DoRA
# DoRA scales each output of a layer as well. Here one is made from the pirate's factors; its magnitudes are the norms of
# the base's weights, as at the start of a training.

# %%
tensors = load_file(ADAPTERS / "pirate" / "adapter_model.safetensors")
config = json.loads((ADAPTERS / "pirate" / "adapter_config.json").read_text())
dora = dict(tensors)
for name in tensors:
    if name.endswith("lora_A.weight"):
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        norm = model.get_submodule(path).weight.norm(dim=1)
        dora[name.replace("lora_A.weight", "lora_magnitude_vector")] = norm

# %%
model.multilora.load(dora, "pirate as DoRA", config={**config, "use_dora": True})

# %% [markdown]
# ## aLoRA
# An activated LoRA counts only from its invocation on. What lies before has the base's keys and values, so that a cache of
# the base can go on under it. Here the invocation is the start of the assistant's turn.

# %%
invocation = tokenizer("<|im_start|>assistant", add_special_tokens=False)["input_ids"]
model.multilora.load(tensors, "pirate as aLoRA", config={**config, "alora_invocation_tokens": invocation})

# %% [markdown]
# ## All kinds in one batch

# %%
prompts = ["Stop! The boy found the old map.", "My brother has a house and a boat."]
ids = [None, "pirate", "pirate as DoRA", "pirate as aLoRA"]
inputs = chat(tokenizer, [prompt for prompt in prompts for _ in ids])
out = model.generate(**inputs, adapter_ids=ids * len(prompts), max_new_tokens=16, do_sample=False)
texts = answers(tokenizer, inputs, out)
SideBySide(prompts, ["base", *ids[1:]], [texts[:4], texts[4:]])

# %% [markdown]
# ## What cannot be mixed says so

# %%
try:
    model.generate(**inputs, adapter_ids={"pirate as DoRA": 0.5, "json": 0.5})
except MultiLoraError as error:
    print(error)

# %%
model.multilora.status()
