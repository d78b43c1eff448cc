"""A PeftModel with several adapters is taken over as it is: no file is read again."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from hf_multilora import disable_multilora, enable_multilora

torch.manual_seed(0)
base = LlamaForCausalLM(
    LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
)
peft_model = get_peft_model(
    base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False), adapter_name="first"
)
peft_model.add_adapter("second", LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False))
peft_model.eval()
ids = torch.randint(1, 128, (1, 8))
with torch.no_grad():
    peft_model.set_adapter("second")
    expected = peft_model(ids).logits

model = enable_multilora(peft_model, max_loras=2, max_lora_rank=8)
print(type(model).__name__, list(model.multilora.adapters))
with torch.no_grad():
    logits = model(ids.repeat(3, 1), adapter_ids=["second", "first", None]).logits
print("largest difference from PEFT:", (logits[:1] - expected).abs().max().item())

disable_multilora(model)  # PEFT's layers are back
with torch.no_grad():
    print("PEFT as before:", torch.equal(peft_model(ids).logits, expected))
