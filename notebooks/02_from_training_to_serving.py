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
# # From training to serving
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/hf-multilora/hf_multilora/blob/main/notebooks/02_from_training_to_serving.ipynb)
#
# Two adapters are trained with PEFT and the Trainer of transformers, in seconds on a CPU. Their checkpoints are then
# compared: all of them answer in one batch.

# %% [markdown]
# On Colab, run `%pip install "hf-multilora[notebooks] @ git+https://github.com/hf-multilora/hf_multilora"` in a cell of its own first. The
# first use fetches a small model, SmolLM2-135M-Instruct (93 MB), and converts it.

# %%
import warnings

warnings.filterwarnings("ignore")  # for a short page

# %%
import os
import tempfile

import matplotlib.pyplot as plt
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, Trainer, TrainingArguments
from transformers.utils import logging

from hf_multilora import disable_multilora, enable_multilora
from hf_multilora.demo.model import demo_model_path
from hf_multilora.integrations.compare import compare_checkpoints, run_checkpoints
from hf_multilora.integrations.trainer import CompareCheckpoints

logging.set_verbosity_error()
logging.disable_progress_bar()

# %%
folder = demo_model_path()
tokenizer = AutoTokenizer.from_pretrained(folder)
base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
base.name_or_path = base.config._name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"  # what it holds
os.chdir(tempfile.mkdtemp())  # checkpoints of this notebook go there

# %% [markdown]
# ## Two tasks
# One adapter shall answer as a cat, the other shall repeat what it hears in capitals.

# %%
HEARD = ["Good morning.", "The train is late.", "I like tea.", "Where are my keys?"]
TASKS = {"cat": ["Meow!" for _ in HEARD], "loud": [text.upper() for text in HEARD]}


def chat_text(prompt, answer=""):
    message = [{"role": "user", "content": prompt}]
    start = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return start + answer


# %% [markdown]
# ## Data: the loss counts the answer only


# %%
def rows_of(answers):
    rows = []
    for prompt, answer in zip(HEARD, answers, strict=True):
        start = tokenizer(chat_text(prompt), add_special_tokens=False)["input_ids"]
        end = tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"]
        rows.append({"input_ids": start + end, "labels": [-100] * len(start) + end})
    return rows


def collate(batch):
    length = max(len(row["input_ids"]) for row in batch)
    pads = {"input_ids": tokenizer.pad_token_id, "labels": -100}
    padded = {n: [row[n] + [pad] * (length - len(row[n])) for row in batch] for n, pad in pads.items()}
    return {name: torch.tensor(values) for name, values in padded.items()}


# %% [markdown]
# ## Training
# `CompareCheckpoints` is a callback: when training ends, every checkpoint of the run answers the prompts, all in one batch.
# The model in training is lent for that, and comes back as it was.

# %%
PROMPTS = ["The soup is cold.", "I have lost my hat."]
WANTED = {"cat": ["Meow!", "Meow!"], "loud": [prompt.upper() for prompt in PROMPTS]}


def train(task):
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    compare = CompareCheckpoints(chats, WANTED[task], max_new_tokens=8)
    arguments = TrainingArguments(
        output_dir=task,
        max_steps=4,
        save_steps=1,
        learning_rate=5e-3,
        per_device_train_batch_size=4,
        save_only_model=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        use_cpu=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows_of(TASKS[task]),
        data_collator=collate,
        processing_class=tokenizer,
        callbacks=[compare],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    model.unload()
    return compare.result


# %%
cat = train("cat")
cat

# %%
loud = train("loud")
loud

# %% [markdown]
# ## How the loss fell
# The loss is that of the wanted answer, in nats a token. Step 0 is the base model.

# %%
figure, axes = plt.subplots(figsize=(5, 3))
for name, run in {"cat": cat, "loud": loud}.items():
    axes.plot(run.steps, list(run.mean_losses.values()), marker="o", label=name)
axes.set(xlabel="step", ylabel="loss of the wanted answer", xticks=cat.steps)
axes.legend()
plt.show()

# %% [markdown]
# ## Serving
# `checkpoint-*` folders load as they are. Here are the best of both runs, and the base, in one batch.

# %%
model = enable_multilora(base.eval(), max_loras=4, max_lora_rank=8)
best = [os.path.join(task, run.best) for task, run in {"cat": cat, "loud": loud}.items()]
model.multilora.load_many({path: path for path in best})

# %%
chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
compare_checkpoints(model, tokenizer, best, chats, max_new_tokens=8)

# %% [markdown]
# `disable_multilora` gives the bare model back, bit for bit: training may go on.

# %%
disable_multilora(model)
list(run_checkpoints("cat"))
