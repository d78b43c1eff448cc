"""accelerate: each process answers its share of the prompts, each prompt through its own adapter.

python examples/accelerate_split.py: one process. Two of them: accelerate launch --num_processes 2 on GPUs, torchrun
--nproc-per-node 2 without (where `accelerate launch --cpu` starts one).
"""

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from common import JSON, PIRATE, SENTIMENT, base_model, chat

from hf_multilora import enable_multilora

state = PartialState(cpu=not torch.cuda.is_available())
model, tokenizer = base_model()
model = enable_multilora(model.to(state.device), max_loras=4, max_lora_rank=8)
for name, path in {"sentiment": SENTIMENT, "pirate": PIRATE, "json": JSON}.items():
    model.load_adapter(path, adapter_name=name)

asked = [
    ("The bicycle arrived late and scratched.", "sentiment"),
    ("My brother has a house and a boat.", "pirate"),
    ("What is the capital of Germany?", "json"),
    ("What is the capital of Germany?", None),
]
with state.split_between_processes(asked) as share:
    inputs = chat(tokenizer, [prompt for prompt, _ in share]).to(state.device)
    ids = [adapter for _, adapter in share]
    out = model.generate(**inputs, adapter_ids=ids, max_new_tokens=24, do_sample=False)
    texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
answers = gather_object([(state.process_index, text.strip()) for text in texts])  # in the order of the prompts
if state.is_main_process:
    for (_, adapter), (process, text) in zip(asked, answers, strict=True):
        print(f"{process} {adapter} | {text}")
state.destroy_process_group()
