"""One generate() call, every row through an adapter of its own, or through the base model (None)."""

from common import JSON, PIRATE, SENTIMENT, base_model, chat, show

from hf_multilora import enable_multilora

model, tokenizer = base_model()
model = enable_multilora(model, max_loras=4, max_lora_rank=8)
for name, path in {"sentiment": SENTIMENT, "pirate": PIRATE, "json": JSON}.items():
    print(model.load_adapter(path, adapter_name=name))

prompts = [
    "The bicycle arrived late and scratched.",
    "My brother has a house and a boat.",
    "What is the capital of Germany?",
    "What is the capital of Germany?",
]
ids = ["sentiment", "pirate", "json", None]
inputs = chat(tokenizer, prompts)
out = model.generate(**inputs, adapter_ids=ids, max_new_tokens=24, do_sample=False)
show(tokenizer, inputs, out, ids)
