"""What a wrapped layer calls: `LinearOp` and `EmbeddingOp`, one per layer, and the `Workspace` of a model.

Three ways to run, chosen by where the call happens:
- eager on CUDA: two prebuilt launches, in place on y; no dispatcher and no allocation between;
- inside torch.compile: the custom ops `torch.ops.hf_multilora.linear` and `.embedding`, with the same kernels inside;
- elsewhere (no Triton, float64, y in an autograd graph): the plain torch path, which writes nothing in place.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError, RoutingError
from . import reference

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from . import launch

MAX_SLICES = 4
_TRITON_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
# Shapes whose launches one op keeps: prompts come in ever new lengths.
_MAX_RECIPES = 64

_is_compiling = torch.compiler.is_compiling
# Absent from builds of torch without CUDA, where nothing asks for them.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Workspace:
    """fp32 planes between shrink and expand: one per model and device, grown when needed.

    Never shared between models: calls of one model are serialised by its lock, those of two models are not.
    A buffer that was outgrown is kept, since a captured CUDA graph may write to it; sizes double, so all the outgrown
    ones together are smaller than the current one.
    """

    def __init__(self) -> None:
        self.planes: Tensor | None = None
        self.pointer = 0
        self.recipes: dict[Any, Any] = {}
        self._outgrown: list[Tensor] = []

    def reserve(self, elems: int, device: torch.device) -> Tensor:
        """Planes of at least `elems` fp32 elements on `device`."""
        if self.planes is None or self.planes.numel() < elems:
            if self.planes is not None:
                self._outgrown.append(self.planes)
                elems = max(elems, 2 * self.planes.numel())
            self.planes = torch.empty(elems, dtype=torch.float32, device=device)
            self.pointer = self.planes.data_ptr()
        return self.planes


class _Op:
    """What both ops share: the arena, and the choice of the way to run."""

    def __init__(
        self,
        data: Tensor,
        meta: Tensor,
        floats: Tensor,
        slot_elems: int,
        zero_off: int,
        site: int,
        widths: Sequence[int],
        max_rank: int,
        workspace: Workspace,
    ) -> None:
        if len(widths) > MAX_SLICES:
            raise ModelError(f"a fused layer of {len(widths)} slices: at most {MAX_SLICES} are served.")
        self.data, self.meta, self.floats, self.slot_elems, self.zero_off = data, meta, floats, slot_elems, zero_off
        self.site, self.widths, self.max_rank, self.workspace = site, tuple(widths), max_rank, workspace
        self.out_features = sum(self.widths)
        self._triton = HAS_TRITON and data.is_cuda and data.dtype in _TRITON_DTYPES
        self._device = data.device.index if data.is_cuda else -1
        self._recipes: dict[Any, Any] = {}
        if data.is_cuda:
            # The arena stays where it is while the model is enabled. Unsaid, CUDA graphs under torch.compile would
            # copy all of it at each replay. (As torch._dynamo.mark_static_address, without _dynamo's slow import.)
            for tensor in (data, meta, floats):
                tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]

    def __call__(
        self,
        y: Tensor,
        x: Tensor,
        row_slots: Tensor,
        rows: int,
        cache: dict[Any, Any] | None = None,
        row_starts: Tensor | None = None,
    ) -> Tensor:
        """Return `gain * y + shift + delta of x` by each row's adapter; rows without one keep their bits.

        Args:
            y: `[..., N]`, what the base layer returned; written in place on CUDA in eager mode.
            x: `[..., K]`, what it was given (an embedding: the ids `[...]`).
            row_slots, rows, cache, row_starts: as for `reference.lora_linear`; the cache serves the plain torch path.

        Raises:
            RoutingError: the tokens do not divide into `rows` rows.
        """
        if self._triton and not _is_compiling():
            recipe = self._recipes.get((x.shape, rows, x.dtype, y.dtype, row_starts is None))
            if recipe is not None and x.is_contiguous() and y.is_contiguous() and not y.requires_grad:
                source, target = x.data_ptr(), y.data_ptr()
                if not (source | target) & 15 and _current_device() == self._device:
                    stream, slots, planes = _raw_stream(self._device), row_slots.data_ptr(), self.workspace.pointer
                    starts = slots if row_starts is None else row_starts.data_ptr()
                    recipe.first(stream, source, slots, starts, planes, self.site)
                    recipe.second(stream, target, slots, starts, planes, self.site)
                    return y
        return self._any_other_call(y, x, row_slots, rows, cache, row_starts)

    def _any_other_call(
        self,
        y: Tensor,
        x: Tensor,
        row_slots: Tensor,
        rows: int,
        cache: dict[Any, Any] | None,
        row_starts: Tensor | None,
    ) -> Tensor:
        if _is_compiling() and not y.requires_grad:
            self._compiled(y, x, row_slots, rows, row_starts)
            return y
        n = y.numel() // self.out_features
        if n == 0 or rows == 0:
            return y
        if n % rows:
            raise RoutingError(f"{n} tokens do not divide into {rows} rows.")
        if not self._triton or y.requires_grad or y.dtype not in _TRITON_DTYPES:
            return self._plain(y.reshape(n, -1), x, row_slots, rows, cache, row_starts).view(y.shape)
        target, source = _unit_stride(y.reshape(n, -1)), self._source(x)
        with torch.cuda.device(self._device):
            planes = self.workspace.reserve(self._plane_elems(n, rows, source), self.data.device)
            recipe = self._launched(target, source, row_slots, planes, rows, row_starts)
        if recipe is not None and x.is_contiguous() and y.is_contiguous():
            if len(self._recipes) >= _MAX_RECIPES:
                self._recipes.clear()
            self._recipes[x.shape, rows, x.dtype, y.dtype, row_starts is None] = recipe
        return y if target.data_ptr() == y.data_ptr() else target.view(y.shape)

    def _source(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _plane_elems(self, n: int, rows: int, source: Tensor) -> int:
        raise NotImplementedError

    def _launched(
        self, y: Tensor, x: Tensor, row_slots: Tensor, planes: Tensor, rows: int, row_starts: Tensor | None
    ) -> Any:
        raise NotImplementedError

    def _plain(
        self,
        y: Tensor,
        x: Tensor,
        row_slots: Tensor,
        rows: int,
        cache: dict[Any, Any] | None,
        row_starts: Tensor | None,
    ) -> Tensor:
        raise NotImplementedError

    def _compiled(self, y: Tensor, x: Tensor, row_slots: Tensor, rows: int, row_starts: Tensor | None) -> None:
        raise NotImplementedError


class LinearOp(_Op):
    """The LoRA branch of one linear layer, of all its slices.

    Args:
        data, meta, floats, slot_elems, zero_off: the arena, as for `reference.lora_linear`.
        site: number of the first slice.
        in_features: K.
        widths: columns of each slice, at most 4; they add up to the layer's N.
        max_rank: largest rank that a slot may hold at this layer.
        workspace: the model's workspace on the arena's device.
    """

    def __init__(
        self,
        data: Tensor,
        meta: Tensor,
        floats: Tensor,
        slot_elems: int,
        zero_off: int,
        site: int,
        in_features: int,
        widths: Sequence[int],
        max_rank: int,
        workspace: Workspace,
    ) -> None:
        super().__init__(data, meta, floats, slot_elems, zero_off, site, widths, max_rank, workspace)
        self.in_features = in_features

    def _source(self, x: Tensor) -> Tensor:
        return _unit_stride(x.reshape(-1, self.in_features))

    def _plane_elems(self, n: int, rows: int, source: Tensor) -> int:
        slices = len(self.widths)
        return launch.plane_elems(n, rows, self.in_features, slices, self.max_rank, source.dtype, self.data.dtype)

    def _launched(
        self, y: Tensor, x: Tensor, row_slots: Tensor, planes: Tensor, rows: int, row_starts: Tensor | None
    ) -> Any:
        arena = (self.data, self.meta, self.floats, row_slots, planes, rows, self.site)
        return launch.linear(
            y, x, *arena, self.widths, self.slot_elems, self.max_rank, self.workspace.recipes, row_starts
        )

    def _plain(
        self,
        y: Tensor,
        x: Tensor,
        row_slots: Tensor,
        rows: int,
        cache: dict[Any, Any] | None,
        row_starts: Tensor | None,
    ) -> Tensor:
        arena = (self.data, self.meta, self.floats, row_slots, rows, self.site)
        x = x.reshape(-1, self.in_features)
        return reference.lora_linear(y, x, *arena, self.widths, self.slot_elems, self.zero_off, cache, row_starts)

    def _compiled(self, y: Tensor, x: Tensor, row_slots: Tensor, rows: int, row_starts: Tensor | None) -> None:
        arena = (self.data, self.meta, self.floats, row_slots, rows, self.site)
        _linear(y, x, *arena, self.widths, self.slot_elems, self.zero_off, self.max_rank, row_starts)


class EmbeddingOp(_Op):
    """The LoRA branch of one embedding; arguments as for `LinearOp`, `width` being the embedding's."""

    def __init__(
        self,
        data: Tensor,
        meta: Tensor,
        floats: Tensor,
        slot_elems: int,
        zero_off: int,
        site: int,
        width: int,
        max_rank: int,
        workspace: Workspace,
    ) -> None:
        super().__init__(data, meta, floats, slot_elems, zero_off, site, (width,), max_rank, workspace)

    def _source(self, x: Tensor) -> Tensor:
        return x.reshape(-1).contiguous()

    def _plane_elems(self, n: int, rows: int, source: Tensor) -> int:
        return n * self.max_rank

    def _launched(
        self, y: Tensor, x: Tensor, row_slots: Tensor, planes: Tensor, rows: int, row_starts: Tensor | None
    ) -> Any:
        arena = (self.data, self.meta, self.floats, row_slots, planes, rows, self.site)
        return launch.embed(
            y, x, *arena, self.out_features, self.slot_elems, self.max_rank, self.workspace.recipes, row_starts
        )

    def _plain(
        self,
        y: Tensor,
        x: Tensor,
        row_slots: Tensor,
        rows: int,
        cache: dict[Any, Any] | None,
        row_starts: Tensor | None,
    ) -> Tensor:
        arena = (self.data, self.meta, self.floats, row_slots, rows, self.site)
        x = x.reshape(-1)
        return reference.lora_embedding(
            y, x, *arena, self.out_features, self.slot_elems, self.zero_off, cache, row_starts
        )

    def _compiled(self, y: Tensor, x: Tensor, row_slots: Tensor, rows: int, row_starts: Tensor | None) -> None:
        arena = (self.data, self.meta, self.floats, row_slots, rows, self.site)
        _embedding(y, x, *arena, self.slot_elems, self.zero_off, self.max_rank, row_starts)


def _unit_stride(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


# Inside torch.compile the planes are allocated in the op: safe in a graph, and no state that Inductor cannot see.
_compiled_recipes: dict[Any, Any] = {}


@torch.library.custom_op("hf_multilora::linear", mutates_args=("y",))
def _linear(
    y: Tensor,
    x: Tensor,
    data: Tensor,
    meta: Tensor,
    floats: Tensor,
    row_slots: Tensor,
    rows: int,
    site: int,
    widths: Sequence[int],
    slot_elems: int,
    zero_off: int,
    max_rank: int,
    row_starts: Tensor | None = None,
) -> None:
    """`reference.lora_linear` in place on y `[..., N]`, on any device."""
    n, k = y.numel() // sum(widths), x.shape[-1]
    if n == 0 or rows == 0:
        return
    target, source = y.reshape(n, -1), _unit_stride(x.reshape(n, k))
    if _runs_triton(y, data):
        target = _unit_stride(target)
        elems = launch.plane_elems(n, rows, k, len(widths), max_rank, x.dtype, data.dtype)
        with torch.cuda.device(y.device):
            planes = torch.empty(elems, dtype=torch.float32, device=y.device)
            tensors = (data, meta, floats, row_slots, planes, rows, site)
            launch.linear(target, source, *tensors, widths, slot_elems, max_rank, _compiled_recipes, row_starts)
        if target.data_ptr() != y.data_ptr():
            y.copy_(target.view(y.shape))
        return
    arena = (data, meta, floats, row_slots, rows, site)
    out = reference.lora_linear(target, source, *arena, widths, slot_elems, zero_off, None, row_starts)
    y.copy_(out.view(y.shape))


@torch.library.custom_op("hf_multilora::embedding", mutates_args=("y",))
def _embedding(
    y: Tensor,
    ids: Tensor,
    data: Tensor,
    meta: Tensor,
    floats: Tensor,
    row_slots: Tensor,
    rows: int,
    site: int,
    slot_elems: int,
    zero_off: int,
    max_rank: int,
    row_starts: Tensor | None = None,
) -> None:
    """`reference.lora_embedding` in place on y `[..., width]`, on any device."""
    n, width = ids.numel(), y.shape[-1]
    if n == 0 or rows == 0:
        return
    target, source = y.reshape(n, width), ids.reshape(n).contiguous()
    if _runs_triton(y, data):
        target = _unit_stride(target)
        with torch.cuda.device(y.device):
            planes = torch.empty(n * max_rank, dtype=torch.float32, device=y.device)
            tensors = (data, meta, floats, row_slots, planes, rows, site)
            launch.embed(target, source, *tensors, width, slot_elems, max_rank, _compiled_recipes, row_starts)
        if target.data_ptr() != y.data_ptr():
            y.copy_(target.view(y.shape))
        return
    arena = (data, meta, floats, row_slots, rows, site)
    out = reference.lora_embedding(target, source, *arena, width, slot_elems, zero_off, None, row_starts)
    y.copy_(out.view(y.shape))


@_linear.register_fake
def _(*args: Any) -> None:
    return None


@_embedding.register_fake
def _(*args: Any) -> None:
    return None


def _runs_triton(y: Tensor, data: Tensor) -> bool:
    return HAS_TRITON and y.is_cuda and y.dtype in _TRITON_DTYPES and data.dtype in _TRITON_DTYPES
