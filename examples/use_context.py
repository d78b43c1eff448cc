"""Ids for code that cannot pass them: a transformers pipeline, a library's own loop, a model that you compiled."""

from common import JSON, PIRATE, base_model
from transformers import pipeline

from hf_multilora import enable_multilora

model, tokenizer = base_model()
model = enable_multilora(model, max_loras=2, max_lora_rank=8)
model.load_adapter(PIRATE, adapter_name="pirate")
model.load_adapter(JSON, adapter_name="json")

generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
chats = [[{"role": "user", "content": "What is the capital of France?"}] for _ in range(3)]
with model.multilora.use(["pirate", None, "json"]):
    answers = generate(chats, batch_size=3, max_new_tokens=24, do_sample=False)
for answer in answers:
    print(answer[0]["generated_text"][-1]["content"])

model.set_adapter("pirate")  # the default of every call without ids
print(generate(chats[0], max_new_tokens=24, do_sample=False)[0]["generated_text"][-1]["content"])
