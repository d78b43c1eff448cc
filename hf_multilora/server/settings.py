"""What a server may do, and how much of it: one dataclass, checked when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from ..errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """Options of a server; see `hf-multilora serve --help` for the same as flags.

    Args:
        served_name: the base model's id in /v1/models and in requests; None: the name of its folder or hub id.
        adapters: folder whose sub-folders are adapters, each nameable by its folder's name.
        load_at_start: load all of them before the first request; else each at its first use.
        allow_on_demand: patterns (as of a shell) of hub ids and absolute paths that `model` and `lora_path` may name;
            none: nothing outside of `adapters`. A pattern that begins with "/" is for paths, any other for hub ids.
        resolvers: entry points of the group "hf_multilora.resolvers" that are asked for other names, in this order.
        allow_runtime_updates: whether the endpoints that load, unload, reload and pin adapters work.
        offline: take hub ids from the cache alone.
        api_keys: keys of which every request but health checks and metrics must bear one; none: no key is needed.
        max_body_bytes: of a request.
        max_model_len: tokens of a prompt and its answer; None: what the model and the cache have room for.
        default_max_tokens: of an answer whose request does not say; None: for chat, as many as there is room for; for
            completions 16, as OpenAI has it.
        max_choices: answers of one request, over all of its prompts.
        max_queue: answers in work or waiting; a request that would go beyond is refused with 503.
        max_adapters_per_client: distinct adapters that one API key may name within `client_window_s` seconds.
        max_on_demand: adapters that are kept registered because somebody asked for them; beyond it, the one that was
            asked for longest ago is unloaded, unless requests use it. Pinned ones do not count.
        max_adapter_bytes: of an adapter's weight files.
        max_metric_adapters: adapters with a label of their own in /metrics; the others share "other".
        request_timeout_s, load_timeout_s, send_timeout_s: seconds for an answer, for loading an adapter, and for a
            client to take what it is sent.
        shutdown_timeout_s: seconds that running requests have to end when the server is stopped; then they fail.

    Raises:
        ConfigError: a value out of range, or a folder that is none.
    """

    served_name: str | None = None
    adapters: Path | None = None
    load_at_start: bool = True
    allow_on_demand: Sequence[str] = ()
    resolvers: Sequence[str] = ()
    allow_runtime_updates: bool = False
    offline: bool = False
    api_keys: Sequence[str] = field(default=(), repr=False)
    max_body_bytes: int = 4 << 20
    max_model_len: int | None = None
    default_max_tokens: int | None = None
    max_choices: int = 64
    max_queue: int = 1024
    max_adapters_per_client: int | None = None
    client_window_s: float = 60.0
    max_on_demand: int = 256
    max_adapter_bytes: int = 4 << 30
    max_metric_adapters: int = 100
    request_timeout_s: float = 600.0
    load_timeout_s: float = 120.0
    send_timeout_s: float = 30.0
    shutdown_timeout_s: float = 20.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if not value > 0 or value == float("inf"):
                raise ConfigError(f"{item.name}={value!r}: expected a number above 0.")
        for name in ("allow_on_demand", "resolvers", "api_keys"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(part, str) and part for part in value):
                raise ConfigError(f"{name}: expected a list of non-empty strings.")
        for key in self.api_keys:
            if not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(
                    "An API key must be printable ASCII without spaces: others cannot travel in a header."
                )
        if self.adapters is not None and not Path(self.adapters).is_dir():
            raise ConfigError(
                f"adapters={str(self.adapters)!r}: no such folder. Name one that holds a sub-folder per adapter."
            )
