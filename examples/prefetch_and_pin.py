"""Keep one adapter resident, bring the next ones in ahead of time, and let go of them again."""

from common import JSON, PIRATE, SENTIMENT, base_model, chat, show

from hf_multilora import enable_multilora

model, tokenizer = base_model()
model = enable_multilora(model, max_loras=2, max_lora_rank=8, max_cpu_loras=8)
for name, path in {"sentiment": SENTIMENT, "pirate": PIRATE, "json": JSON}.items():
    model.load_adapter(path, adapter_name=name)

model.multilora.pin("pirate")  # never evicted from now on
model.multilora.prefetch(["json"])  # starts the copy and returns at once
print(model.multilora.status())

inputs = chat(tokenizer, ["Stop! The boy found the old map."] * 2)
for ids in (["pirate", "json"], ["pirate", "sentiment"]):  # the second call evicts json, not pirate
    out = model.generate(**inputs, adapter_ids=ids, max_new_tokens=24, do_sample=False)
    show(tokenizer, inputs, out, ids)

model.multilora.unpin("pirate")
model.multilora.unload("json")  # frees its slot and its host memory
print(model.multilora.status())
