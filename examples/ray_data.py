"""Ray Data: rows with a prompt and an adapter each, answered by actors; a second run would find nothing to do."""

import tempfile

import pyarrow.parquet as parquet
import ray

from hf_multilora.demo import ADAPTERS
from hf_multilora.demo.model import demo_model_path
from hf_multilora.integrations.ray import MultiLoraPredictor, unanswered

ray.init(num_cpus=2, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False)
ds = ray.data.from_items(
    [
        {"id": 1, "prompt": "The bicycle arrived late and scratched.", "adapter": "sentiment"},
        {"id": 2, "prompt": "My brother has a house and a boat.", "adapter": "pirate"},
        {"id": 3, "prompt": "What is the capital of Germany?", "adapter": None},
        {"id": 4, "prompt": "What is the capital of Germany?", "adapter": "no-such-adapter"},
    ]
)
options = {
    "model": str(demo_model_path()), "adapters": str(ADAPTERS), "chat": True, "max_new_tokens": 24, "dtype": "float32",
    "max_loras": 2, "max_lora_rank": 8, "batching": {"num_blocks": 16, "max_batch_tokens": 128},
}  # fmt: skip
with tempfile.TemporaryDirectory() as answers:
    left = unanswered(ds, answers, "id")  # after an interruption: what that run has not written
    left.map_batches(MultiLoraPredictor, fn_constructor_kwargs=options, concurrency=(1, 2)).write_parquet(answers)
    print(unanswered(ds, answers, "id").count(), "rows left")
    for row in sorted(parquet.read_table(answers).to_pylist(), key=lambda row: row["id"]):
        print(row["adapter"], "|", row["text"] if row["error"] is None else row["error"])
ray.shutdown()
