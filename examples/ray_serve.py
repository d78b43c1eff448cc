"""Ray Serve: two replicas share a folder of adapters; requests go to where theirs resides."""

import json
import socket
import urllib.request

import ray
from ray import serve

from hf_multilora.demo import ADAPTERS
from hf_multilora.demo.model import demo_model_path
from hf_multilora.integrations.ray import serve_app
from hf_multilora.server import Settings

with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
ray.init(num_cpus=4, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "ERROR"})
app = serve_app(
    str(demo_model_path()),
    Settings(adapters=ADAPTERS, served_name="smollm2"),
    max_loras=2,
    max_lora_rank=8,
    batching={"num_blocks": 16, "max_batch_tokens": 128},
    replica_options={"num_replicas": 2},  # with GPUs: "ray_actor_options": {"num_gpus": 1}
)
serve.run(app)


def ask(model: str, prompt: str) -> None:
    messages = [{"role": "user", "content": prompt}]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 24, "temperature": 0}).encode()
    url, headers = f"http://127.0.0.1:{port}/v1/chat/completions", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"].strip()
        print(f"{model:<10} {text}  (there before: {answer.headers['x-multilora-resident']})")


for model in ("pirate", "pirate", "sentiment"):
    ask(model, "My brother has a house and a boat.")
ask("smollm2", "What is the capital of Germany?")
ray.shutdown()
