"""A dict of weights on a row mixes adapters there, as PEFT's add_weighted_adapter(combination_type="cat") would."""

from common import JSON, PIRATE, base_model, chat, show

from hf_multilora import enable_multilora

model, tokenizer = base_model()
# The ranks of a mix add up: pirate has rank 8, json rank 4.
model = enable_multilora(model, max_loras=4, max_lora_rank=12)
model.load_adapter(PIRATE, adapter_name="pirate")
model.load_adapter(JSON, adapter_name="json")

ids = [None, "pirate", {"pirate": 0.8, "json": 0.6}, {"pirate": 0.4, "json": 1.0}, "json"]
inputs = chat(tokenizer, ["Where is the old treasure?"] * len(ids))
out = model.generate(**inputs, adapter_ids=ids, max_new_tokens=24, do_sample=False)
show(tokenizer, inputs, out, ids)
print()
print(model.multilora.status())
