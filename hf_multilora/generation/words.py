"""The adapter words that every transformers model already has, working through slots.

Signatures are transformers' own (PeftAdapterMixin); what cannot work the same way raises and says what to do.
"""

from __future__ import annotations

from typing import Any

from transformers.utils import logging

from ..errors import ModelError, RoutingError
from ..report import LoadReport
from .ids import to_key

logger = logging.get_logger(__name__)


class AdapterWords:
    """load_adapter, set_adapter and their kin, redirected."""

    multilora: Any  # the handle (api.MultiLora); transformers resolves the annotations of model classes at run time

    def load_adapter(
        self,
        peft_model_id: Any = None,
        adapter_name: str | None = None,
        peft_config: dict[str, Any] | Any | None = None,
        adapter_state_dict: dict[str, Any] | None = None,
        low_cpu_mem_usage: bool = False,
        is_trainable: bool = False,
        hotswap: bool | str = "auto",
        local_files_only: bool = False,
        adapter_kwargs: dict[str, Any] | None = None,
        load_config: Any = None,
        **kwargs: Any,
    ) -> LoadReport:
        """Register an adapter under a name; it serves the rows that name it, and no others.

        Args:
            peft_model_id: folder or hub id; None with `adapter_state_dict` and `peft_config`.
            adapter_name: the id to use later; "default" if not given, as in transformers.
            kwargs: revision, token, subfolder, reload, strict_base, ignore_untargeted: see `MultiLora.load`.

        Returns:
            LoadReport: what was found and what became of it.

        Raises:
            ModelError: is_trainable or hotswap, which slots do not offer.
            AdapterExistsError: the name exists and reload=True was not given.
        """
        if is_trainable:
            raise ModelError("is_trainable=True: an enabled model serves adapters only. Train with PEFT, then load.")
        if hotswap is True:
            raise ModelError("hotswap=True: use reload=True, which also waits for rows in flight.")
        if load_config is not None:
            raise ModelError("load_config= is not taken here: pass revision=, token=, subfolder= themselves.")
        options = {**(adapter_kwargs or {}), **kwargs}
        known = {"revision", "token", "subfolder", "reload", "strict_base", "ignore_untargeted"}
        unknown = sorted(name for name, value in options.items() if name not in known and value is not None)
        if unknown:
            raise ModelError(f"load_adapter does not take {', '.join(unknown)}. It takes {', '.join(sorted(known))}.")
        source = adapter_state_dict if adapter_state_dict is not None else peft_model_id
        if source is None:
            raise ModelError("load_adapter needs a folder, a hub id, or adapter_state_dict with peft_config.")
        if peft_config is not None and hasattr(peft_config, "to_dict"):
            peft_config = peft_config.to_dict()
        logger.warning_once(
            "load_adapter registers the adapter and does not activate it (transformers' own does): name it in "
            "adapter_ids, or make it the default with set_adapter."
        )
        options = {name: value for name, value in options.items() if name in known and value is not None}
        name = "default" if adapter_name is None else adapter_name
        return self.multilora.load(source, name, config=peft_config, local_files_only=local_files_only, **options)

    def set_adapter(self, adapter_name: str) -> None:
        """Make an adapter the default of calls that name none.

        Raises:
            RoutingError: a list (name a mix in adapter_ids instead).
            AdapterNotFoundError: not registered.
        """
        if not isinstance(adapter_name, str):
            raise RoutingError(
                f"set_adapter takes one name, not {adapter_name!r}. Several adapters at once are a mix: pass "
                "adapter_ids={'a': 0.7, 'b': 0.3}."
            )
        key = to_key(adapter_name, "set_adapter")
        if key is not None:
            self.multilora.ensure(adapter_name)
        self.multilora.calls.default = key

    def disable_adapters(self) -> None:
        """Drop the default: calls without ids are the base model again. Explicit ids still count."""
        self.multilora.calls.default = None

    def enable_adapters(self) -> None:
        """Not offered: there is no hidden default to come back to."""
        raise ModelError("enable_adapters: choose the default with set_adapter(name).")

    def active_adapters(self) -> list[str]:
        """The default adapter, as a list; empty for the base model."""
        default = self.multilora.calls.default
        return [default] if isinstance(default, str) else []

    def delete_adapter(self, adapter_names: list[str] | str) -> None:
        """Unload adapters; rows in flight end first."""
        for name in [adapter_names] if isinstance(adapter_names, str) else list(adapter_names):
            self.multilora.unload(name)

    def add_adapter(self, adapter_config: Any, adapter_name: str | None = None) -> None:
        raise ModelError(
            "add_adapter makes a fresh adapter to train, and an enabled model serves only. Load a trained one with "
            "load_adapter, or call disable_multilora(model) first."
        )

    def get_adapter_state_dict(self, adapter_name: str | None = None, state_dict: Any = None) -> dict[str, Any]:
        raise ModelError("get_adapter_state_dict: slots hold adapters packed. Read the checkpoint they came from.")

    def enable_peft_hotswap(self, *args: Any, **kwargs: Any) -> None:
        raise ModelError("enable_peft_hotswap: use load_adapter(..., reload=True).")
