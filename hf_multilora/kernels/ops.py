"""What wrapped layers call: a `LinearOp` for each layer and for each group of layers that read one x, an `EmbeddingOp`
for each embedding, and the `Workspace` of a model.

Four ways to run, chosen by where the call happens:
- eager on CUDA: prebuilt launches, in place on y; no dispatcher and no allocation between;
- while a CUDA graph is captured: deltas on a stream of their own, beside the base layers, then added in place;
- inside torch.compile: the same through the custom ops of `custom`, where the compiler fuses the addition with what
  comes next;
- elsewhere (no Triton, float64, y in an autograd graph): the plain torch path, which writes nothing in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError, RoutingError
from . import custom, reference
from .custom import HAS_TRITON, TRITON_DTYPES, parts_of, slices_of, unit_stride
from .segments import tile_count
from .tuning import MAX_SEGMENT_TOKENS, MAX_SLICES, is_decode

if HAS_TRITON:
    from . import launch

# Shapes whose launches one op keeps: prompts come in ever new lengths.
_MAX_RECIPES = 64

# Unlike is_compiling, false for threads that run beside one that compiles.
_is_compiling = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled
# Absent from builds of torch without CUDA, where nothing asks for them.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Workspace:
    """What the kernels of one model share: fp32 planes between shrink and expand, grown when needed, and counters.

    Never shared between models: calls of one model are serialised by its lock, those of two models are not.
    A buffer that was outgrown is kept, since a captured CUDA graph may write to it; sizes double, so all the outgrown
    ones together are smaller than the current one.
    """

    def __init__(self) -> None:
        self.planes: Tensor | None = None
        self.pointer = 0
        self.recipes: dict[Any, Any] = {}
        self._counters: Tensor | None = None
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

    def counters(self, adapters: int, device: torch.device) -> Tensor:
        """int32 zeros, which every kernel leaves as zeros; enough for any call over so many slots."""
        if self._counters is None:
            with torch.inference_mode(False):
                size = MAX_SLICES * tile_count(MAX_SEGMENT_TOKENS, adapters)
                self._counters = torch.zeros(size, dtype=torch.int32, device=device)
        return self._counters


class ArenaOp:
    """What all ops share: the arena."""

    # Slots lie side by side: between two calls of one op all else of the model has passed through the caches.
    __slots__ = (
        "__weakref__", "_device", "_recipes", "_triton", "arena", "counters", "data", "floats", "key", "max_rank",
        "meta", "out_features", "site", "slot_elems", "widths", "workspace", "zero_off",
    )  # fmt: skip

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
        self._triton = HAS_TRITON and data.is_cuda and data.dtype in TRITON_DTYPES
        self._device = data.device.index if data.is_cuda else -1
        self._recipes: dict[Any, Any] = {}
        self.key = custom.register(self)
        self.counters = data.new_empty(0, dtype=torch.int32)
        if self._triton:
            self.counters = workspace.counters(meta.shape[0], data.device)
            self.arena = launch.Arena(data, meta, floats, self.counters, slot_elems, max_rank)


class _Bound:
    """The recipe of an op's last call, and what that call must have in common with the next for it to be right."""

    __slots__ = ("addresses", "recipe", "rows", "shape", "slots", "starts", "x", "y")

    def __init__(
        self,
        recipe: Any,
        slots: Tensor,
        rows: int,
        starts: Tensor | None,
        shape: torch.Size,
        x: torch.dtype,
        y: torch.dtype,
    ) -> None:
        self.recipe, self.slots, self.rows, self.starts = recipe, slots, rows, starts
        self.shape, self.x, self.y = shape, x, y
        address = slots.data_ptr()
        self.addresses = address, address if starts is None else starts.data_ptr()


class LinearOp(ArenaOp):
    """The LoRA branch of a group of linear layers that read the same x; most groups are one layer.

    Args:
        data, meta, floats, slot_elems, zero_off: the arena, as for `reference.lora_linear`.
        site: number of the first slice; the others follow it.
        in_features: K.
        widths: columns of each slice of all layers, at most 4 in sum.
        max_rank: largest rank that a slot may hold at these layers.
        workspace: the model's workspace on the arena's device.
        outputs: columns of each layer's output; each is made of whole slices, in order. None: one layer.

    Raises:
        ModelError: more than 4 slices.
        ValueError: outputs that are not made of whole slices.
    """

    __slots__ = ("_bound", "_columns", "in_features", "layers", "outputs")

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
        outputs: Sequence[int] | None = None,
    ) -> None:
        super().__init__(data, meta, floats, slot_elems, zero_off, site, widths, max_rank, workspace)
        self.in_features = in_features
        self.outputs = (self.out_features,) if outputs is None else tuple(outputs)
        self.layers = tuple(parts_of(site, self.widths, self.outputs))
        # (output, first column) of each slice, where not every slice is a whole output
        self._columns: tuple[tuple[int, int], ...] | None = None
        self._bound: _Bound | None = None
        if self.widths != self.outputs:
            self._columns = tuple(
                (number, sum(columns[:place]))
                for number, (_, columns) in enumerate(self.layers)
                for place in range(len(columns))
            )

    def over(self, widths: Sequence[int], outputs: Sequence[int]) -> LinearOp:
        """The same from its first site on over the slices of more layers, of as many columns."""
        arena = (self.data, self.meta, self.floats, self.slot_elems, self.zero_off, self.site)
        return LinearOp(*arena, self.in_features, widths, self.max_rank, self.workspace, outputs)

    def __call__(
        self,
        ys: tuple[Tensor, ...],
        x: Tensor,
        row_slots: Tensor,
        rows: int,
        cache: dict[Any, Any] | None = None,
        row_starts: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return each layer's `gain * y + shift + delta of x` by each row's adapter; rows without one keep their bits.

        Args:
            ys: `[..., N_i]`, what the base layers returned; written in place on CUDA in eager mode.
            x: `[..., K]`, what they were given.
            row_slots: int32, the rows' slots, or a row table (`segments`).
            rows, cache, row_starts: as for `reference.lora_linear`; the cache serves the plain torch path.

        Raises:
            RoutingError: the tokens do not divide into `rows` rows.
        """
        # Runs at every layer of every eager step: as little Python as there can be.
        if self._triton and not _is_compiling():
            bound = self._bound
            shape, dtype = x.shape, ys[0].dtype
            if (
                bound is None
                or bound.slots is not row_slots
                or bound.rows != rows
                or bound.shape != shape
                or bound.starts is not row_starts
                or bound.x is not x.dtype
                or bound.y is not dtype
            ):
                recipe = self._recipes.get((shape, rows, x.dtype, dtype, row_starts is None, row_slots.shape))
                bound = None if recipe is None else _Bound(recipe, row_slots, rows, row_starts, shape, x.dtype, dtype)
                self._bound = bound
            if bound is not None and self._run(bound, ys, x):
                return ys
        return self.end(ys, x, None, row_slots, rows, cache, row_starts)

    def begin(self, x: Tensor, row_slots: Tensor, rows: int, row_starts: Tensor | None = None) -> Tensor | None:
        """Start on x, before the base layers run; what is returned goes to `end`.

        A compiled forward must not call this where slots may hold gains or shifts: it would leave them out.

        None where there is nothing to gain: outside of compiled and captured forwards, at long prompts, and where
        autograd is on (the base layers' outputs, which nobody has seen yet, decide about the path then).
        """
        if not self._triton or row_starts is not None or rows == 0 or x.numel() == 0:
            return None
        n = x.numel() // self.in_features
        if n % rows or not is_decode(n, rows) or x.dtype not in TRITON_DTYPES:
            return None
        if _is_compiling():
            if torch.is_grad_enabled():
                return None
            return custom.delta(x, row_slots, self.key, rows)
        if not torch.cuda.is_current_stream_capturing():
            return None
        return custom.begin(x, self, row_slots, rows)

    def end(
        self,
        ys: tuple[Tensor, ...],
        x: Tensor,
        h: Tensor | None,
        row_slots: Tensor,
        rows: int,
        cache: dict[Any, Any] | None = None,
        row_starts: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Add to `ys`, after the base layers ran; arguments and result as for the op itself, h from `begin`."""
        grad = any(y.requires_grad for y in ys)
        if _is_compiling() and not grad:
            if h is not None:
                custom.join_(h, x, ys, row_slots, self.key, rows)
                return tuple((y + d).to(y.dtype) for y, d in zip(ys, h.split(self.outputs, -1), strict=True))
            custom.expand_(ys, x, row_slots, self.key, rows, row_starts)
            return ys
        if h is not None:
            custom.join(h, x, self, row_slots, rows)
        n = x.numel() // self.in_features
        if n == 0 or rows == 0:
            return ys
        if n % rows:
            raise RoutingError(f"{n} tokens do not divide into {rows} rows.")
        if self._triton and not grad and all(y.dtype in TRITON_DTYPES for y in ys):
            return self._launch(ys, x, n, h, launch.Rows(row_slots, row_starts, rows))
        source, out = x.reshape(n, -1), []
        for y, (site, widths) in zip(ys, self.layers, strict=True):
            arena = (self.data, self.meta, self.floats, row_slots.view(-1)[:rows], rows, site)
            rest = (self.slot_elems, self.zero_off, cache, row_starts)
            out.append(reference.lora_linear(y.reshape(n, -1), source, *arena, widths, *rest).view(y.shape))
        return tuple(out)

    def _launch(self, ys: tuple[Tensor, ...], x: Tensor, n: int, h: Tensor | None, row_map: Any) -> tuple[Tensor, ...]:
        """Ordinary launches, and a recipe for the next call."""
        targets = [unit_stride(y.reshape(n, -1)) for y in ys]
        views, recipe = slices_of(targets, self.widths), None
        with torch.cuda.device(self._device):
            if h is not None:
                launch.finish(views, h, self.arena, row_map, self.site)
            else:
                source = unit_stride(x.reshape(n, -1))
                dtypes = (x.dtype, ys[0].dtype)
                call = launch.describe(n, self.in_features, self.widths, *dtypes, self.arena, row_map)
                planes = self.workspace.reserve(launch.plane_elems(call), self.data.device)
                recipe = launch.linear(views, source, self.arena, row_map, planes, self.site, self.workspace.recipes)
        dtype = ys[0].dtype
        if recipe is not None and x.is_contiguous() and all(y.is_contiguous() and y.dtype is dtype for y in ys):
            if len(self._recipes) >= _MAX_RECIPES:
                self._recipes.clear()
            starts, slots = row_map.starts is None, row_map.slots.shape
            self._recipes[x.shape, row_map.rows, x.dtype, dtype, starts, slots] = recipe
        pairs = zip(ys, targets, strict=True)
        return tuple(y if target.data_ptr() == y.data_ptr() else target.view(y.shape) for y, target in pairs)

    def _run(self, bound: _Bound, ys: tuple[Tensor, ...], x: Tensor) -> bool:
        """Prepared launches; False where these tensors are not like those that the recipe was made for."""
        device = self._device
        if not x.is_contiguous():
            return False
        if _current_device() != device:  # a layer of a model that computes on several
            with torch.cuda.device(device):
                return self._run(bound, ys, x)
        graph, dtype = _grad_enabled(), bound.y
        bits = source = x.data_ptr()
        pointers = []
        for y in ys:
            if y.dtype is not dtype or not y.is_contiguous() or (graph and y.requires_grad):
                return False
            pointer = y.data_ptr()
            bits |= pointer
            pointers.append(pointer)
        if bits & 15:
            return False
        if self._columns is not None:
            size = ys[0].element_size()
            pointers = [pointers[output] + size * column for output, column in self._columns]
        pointers += pointers[:1] * (MAX_SLICES - len(pointers))
        slots, starts = bound.addresses
        bound.recipe(_raw_stream(device), source, slots, starts, self.workspace.pointer, self.site, *pointers)
        return True


class EmbeddingOp(ArenaOp):
    """The LoRA branch of one embedding; arguments as for `LinearOp`, `width` being the embedding's."""

    __slots__ = ()

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

    def __call__(
        self,
        y: Tensor,
        x: Tensor,
        row_slots: Tensor,
        rows: int,
        cache: dict[Any, Any] | None = None,
        row_starts: Tensor | None = None,
    ) -> Tensor:
        """As for `LinearOp`, with one y and the ids `[...]` for x."""
        if _is_compiling() and not y.requires_grad:
            custom.embedding(y, x, row_slots, self.key, rows, row_starts)
            return y
        if self._triton and not _is_compiling():
            recipe = self._recipes.get((x.shape, rows, x.dtype, y.dtype, row_starts is None))
            if recipe is not None and x.is_contiguous() and y.is_contiguous() and not y.requires_grad:
                source, target = x.data_ptr(), y.data_ptr()
                if _current_device() != self._device:
                    with torch.cuda.device(self._device):
                        return self(y, x, row_slots, rows, cache, row_starts)
                if not (source | target) & 15:
                    stream, slots, planes = _raw_stream(self._device), row_slots.data_ptr(), self.workspace.pointer
                    starts = slots if row_starts is None else row_starts.data_ptr()
                    recipe(stream, source, slots, starts, planes, self.site, target, target, target, target)
                    return y
        n = x.numel()
        if n == 0 or rows == 0:
            return y
        if n % rows:
            raise RoutingError(f"{n} tokens do not divide into {rows} rows.")
        if self._triton and not y.requires_grad and y.dtype in TRITON_DTYPES:
            return self._launch(y, x, n, launch.Rows(row_slots, row_starts, rows))
        arena = (self.data, self.meta, self.floats, row_slots.view(-1)[:rows], rows, self.site)
        rest = (self.out_features, self.slot_elems, self.zero_off, cache, row_starts)
        return reference.lora_embedding(y.reshape(n, -1), x.reshape(n), *arena, *rest).view(y.shape)

    def _launch(self, y: Tensor, x: Tensor, n: int, row_map: Any) -> Tensor:
        """Ordinary launches, and a recipe for the next call."""
        target, source = unit_stride(y.reshape(n, -1)), x.reshape(n).contiguous()
        with torch.cuda.device(self._device):
            planes = self.workspace.reserve(n * self.max_rank, self.data.device)
            recipe = launch.embed(target, source, self.arena, row_map, planes, self.site, self.workspace.recipes)
        if recipe is not None and x.is_contiguous() and y.is_contiguous():
            if len(self._recipes) >= _MAX_RECIPES:
                self._recipes.clear()
            self._recipes[x.shape, row_map.rows, x.dtype, y.dtype, row_map.starts is None] = recipe
        return y if target.data_ptr() == y.data_ptr() else target.view(y.shape)
