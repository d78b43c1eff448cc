"""What a wrapped layer calls: `LinearOp` and `EmbeddingOp`, one per layer, and the `Workspace` of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import reference


class Workspace:
    """fp32 planes between shrink and expand: one per model and device, grown when needed.

    Never shared between models: calls of one model are serialised by its lock, those of two models are not.
    """


class LinearOp:
    """The LoRA branch of one linear layer, of all its slices.

    Args:
        data, meta, slot_elems, zero_off: the arena, as for `reference.lora_linear`.
        site: number of the first slice.
        in_features: K.
        widths: columns of each slice; they add up to the layer's N.
        max_rank: largest rank that a slot may hold at this layer.
        workspace: the model's workspace on the arena's device.
    """

    def __init__(
        self,
        data: Tensor,
        meta: Tensor,
        slot_elems: int,
        zero_off: int,
        site: int,
        in_features: int,
        widths: Sequence[int],
        max_rank: int,
        workspace: Workspace,
    ) -> None:
        self.data, self.meta, self.slot_elems, self.zero_off = data, meta, slot_elems, zero_off
        self.site, self.in_features, self.widths, self.max_rank = site, in_features, tuple(widths), max_rank
        self.out_features = sum(self.widths)
        self.workspace = workspace

    def __call__(
        self, y: Tensor, x: Tensor, row_slots: Tensor, rows: int, cache: dict[Any, Any] | None = None
    ) -> Tensor:
        """Return y `[..., N]` with the delta of x `[..., K]` added; rows without an adapter keep their bits."""
        out = reference.lora_linear(
            y.reshape(-1, self.out_features),
            x.reshape(-1, self.in_features),
            self.data,
            self.meta,
            row_slots,
            rows,
            self.site,
            self.widths,
            self.slot_elems,
            self.zero_off,
            cache,
        )
        return out.view(y.shape)


class EmbeddingOp:
    """The LoRA branch of one embedding; arguments as for `LinearOp`, `width` being the embedding's."""

    def __init__(
        self,
        data: Tensor,
        meta: Tensor,
        slot_elems: int,
        zero_off: int,
        site: int,
        width: int,
        max_rank: int,
        workspace: Workspace,
    ) -> None:
        self.data, self.meta, self.slot_elems, self.zero_off = data, meta, slot_elems, zero_off
        self.site, self.width, self.max_rank = site, width, max_rank
        self.workspace = workspace

    def __call__(
        self, y: Tensor, ids: Tensor, row_slots: Tensor, rows: int, cache: dict[Any, Any] | None = None
    ) -> Tensor:
        """Return y `[..., width]` with the delta of the tokens `ids [...]` added."""
        out = reference.lora_embedding(
            y.reshape(-1, self.width),
            ids.reshape(-1),
            self.data,
            self.meta,
            row_slots,
            rows,
            self.site,
            self.width,
            self.slot_elems,
            self.zero_off,
            cache,
        )
        return out.view(y.shape)
