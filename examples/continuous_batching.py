"""Continuous batching: requests of different lengths that come at any time, three adapters over two slots."""

from common import JSON, PIRATE, SENTIMENT, base_model
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_multilora import enable_multilora

model, tokenizer = base_model()
model = enable_multilora(model, max_loras=2, max_lora_rank=8)
for name, path in {"sentiment": SENTIMENT, "pirate": PIRATE}.items():
    model.load_adapter(path, adapter_name=name)


def tokens(prompt: str) -> list[int]:
    chat = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]


config = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=tokenizer.eos_token_id)
sizes = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=128)  # by default the cache takes what is free
prompt = "My brother has a house and a boat."
with model.continuous_batching_context_manager(config, continuous_batching_config=sizes) as manager:
    asked = {}
    for adapter in ("pirate", None, "sentiment", JSON, "pirate"):  # JSON: a folder, loaded while the others run
        asked[manager.add_request(tokens(prompt), adapter_id=adapter)] = adapter
    answers = {}
    while len(answers) < len(asked):
        result = manager.get_result(timeout=60)
        assert result is not None and result.error is None, result
        answers[result.request_id] = tokenizer.decode(result.generated_tokens, skip_special_tokens=True).strip()
    status = manager.status()
for request, adapter in asked.items():
    print(f"{str(adapter).rpartition('/')[2]:<12} {answers[request]}")
print()
print(status)
