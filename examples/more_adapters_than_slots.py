"""Two slots, three adapters in one batch: generate() runs in waves and returns the rows in the caller's order."""

from common import JSON, PIRATE, SENTIMENT, base_model, chat, show

from hf_multilora import enable_multilora

model, tokenizer = base_model()
model = enable_multilora(model, max_loras=2, max_lora_rank=8)
for name, path in {"sentiment": SENTIMENT, "pirate": PIRATE, "json": JSON}.items():
    model.load_adapter(path, adapter_name=name)

ids = ["json", "sentiment", None, "pirate", "json"]
inputs = chat(tokenizer, ["Best pizza in town, friendly staff too."] * len(ids))
out = model.generate(**inputs, adapter_ids=ids, max_new_tokens=24, do_sample=False)
show(tokenizer, inputs, out, ids)
print()
print(model.multilora.status())
