"""An encoder-decoder model: a small random T5, with adapters on its attention and feed-forward layers."""

import tempfile

import torch
from common import save_random_adapter
from transformers import T5Config, T5ForConditionalGeneration

from hf_multilora import disable_multilora, enable_multilora

torch.manual_seed(0)
config = T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0)
model = T5ForConditionalGeneration(config).eval()

with tempfile.TemporaryDirectory() as folder:
    summary = save_random_adapter(f"{folder}/summary", model, seed=1, r=4, target_modules=["q", "v"])
    title = save_random_adapter(f"{folder}/title", model, seed=2, r=8, target_modules=["q", "k", "v", "o", "wi", "wo"])

    model = enable_multilora(model, max_loras=2, max_lora_rank=8)
    print(model.load_adapter(summary, adapter_name="summary"))
    print(model.load_adapter(title, adapter_name="title"))

ids = ["summary", "title", None]
inputs = torch.randint(1, 128, (1, 12)).repeat(3, 1)
out = model.generate(input_ids=inputs, adapter_ids=ids, num_beams=2, max_new_tokens=8, do_sample=False)
for adapter_id, row in zip(ids, out.tolist(), strict=True):
    print(adapter_id, row)

model = disable_multilora(model)  # as it was, bit for bit
plain = model.generate(input_ids=inputs[:1], num_beams=2, max_new_tokens=8, do_sample=False)
print("bare ", plain[0].tolist())
