"""The static cache; on a GPU transformers compiles this path, and one captured graph serves every mix of adapters."""

from common import JSON, PIRATE, SENTIMENT, base_model, chat, show

from hf_multilora import enable_multilora

model, tokenizer = base_model()
model = enable_multilora(model, max_loras=4, max_lora_rank=8)
for name, path in {"sentiment": SENTIMENT, "pirate": PIRATE, "json": JSON}.items():
    model.load_adapter(path, adapter_name=name)

inputs = chat(tokenizer, ["Stop! The boy found the old map.", "What is the capital of France?"])
for ids in (["pirate", "json"], ["sentiment", "pirate"], [None, "json"]):
    out = model.generate(**inputs, adapter_ids=ids, cache_implementation="static", max_new_tokens=24, do_sample=False)
    show(tokenizer, inputs, out, ids)
