"""A Ray Serve application: replicas that share a folder of adapters, behind OpenAI's endpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ...base_model import check_dtype
from ...config import MultiLoraConfig
from ...errors import ConfigError
from ...server import Settings
from .ingress import Ingress
from .replica import Base, Replica
from .residents import Resident

DEPLOYMENT = "MultiLora"
_UNLIMITED = 1 << 30


def serve_app(
    model: str,
    settings: Settings,
    *,
    resident: int | None = None,
    by_residency: bool = True,
    dtype: str = "auto",
    device: str | None = None,
    batching: dict[str, Any] | None = None,
    replica_options: dict[str, Any] | None = None,
    ingress_options: dict[str, Any] | None = None,
    **slots: Any,
) -> Any:
    """An application for serve.run: OpenAI's endpoints for completions and chats, whole and streamed, and /v1/models.

        from ray import serve
        serve.run(serve_app("org/base", Settings(adapters="/shared/adapters"), max_loras=8,
                            replica_options={"num_replicas": 3, "ray_actor_options": {"num_gpus": 1}}))

    A request goes to a replica where its adapter resides, as Serve's multiplexed model ids say; where none does, or
    all that do are full, to one with the fewest. Ids are for routing alone: requests for different adapters share
    batches, which our manager makes. In a replica, the adapter that was asked for longest ago is unloaded once
    `resident` others are there and no request uses it.

    Where a replica is lost, its requests are sent to another one, as long as no part of an answer has gone out; a
    stream that has begun ends with an error event. Three replicas lost over one request: 503. Headers of an answer:
    `x-multilora-replica`, and `x-multilora-resident`, whether the adapter was there before.

    Without HTTP: `serve.get_deployment_handle("MultiLora", "default")`, and `Replica.generate`. Nothing is sent again
    there: a lost replica raises Ray's ActorDiedError.

    Args:
        model: folder or hub id of the base model, the same on every node.
        settings: of the server; `adapters` is a folder that all nodes share. Adapters are loaded where they are asked
            for, and limits (max_queue, max_adapters_per_client) are those of one replica.
        resident: adapters of one replica; None: max_cpu_loras, else max_loras.
        by_residency: False: any replica gets any request.
        dtype, device: of the base model, see `load_base`.
        batching: options of `hf_multilora.server.Engine`.
        replica_options, ingress_options: options of their deployments: num_replicas, autoscaling_config, ….
        slots: options of enable_multilora: max_loras, max_lora_rank, max_cpu_loras.

    Returns:
        A bound Serve application.

    Raises:
        ConfigError: an option that cannot be honoured.
    """
    from ray import serve

    check_dtype(dtype)
    config = MultiLoraConfig(on_demand=False, **slots)
    if settings.allow_runtime_updates:
        raise ConfigError(
            "allow_runtime_updates: an adapter would change in one replica alone. Put it into the folder of adapters; "
            "it is loaded when it is named."
        )
    most = resident or config.max_cpu_loras or config.max_loras
    path = Path(model)
    name = settings.served_name or (path.resolve() if path.is_dir() else path).name
    settings = replace(settings, served_name=name, load_at_start=False, max_on_demand=_UNLIMITED)

    class MultiLora(Replica):
        @serve.multiplexed(max_num_models_per_replica=most)
        async def resident(self, name: str) -> Resident:
            return await super().resident(name)

    several = {"max_ongoing_requests": 128, **(replica_options or {})}
    front = {"max_ongoing_requests": 1024, **(ingress_options or {})}
    replicas = serve.deployment(name=DEPLOYMENT, **several)(MultiLora)
    ingress = serve.deployment(name=f"{DEPLOYMENT}Ingress", **front)(Ingress)
    base = Base(model, dtype, device, settings.offline, slots, batching or {})
    return ingress.bind(replicas.bind(base, settings), settings, name, by_residency)
