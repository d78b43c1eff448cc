"""Siblings: linear layers of one parent that read the same input (q/k/v, gate/up), served by one op.

Whichever of them is called first with a new input leads: it runs the base layers of all, then one op for all, and
leaves the others' outputs in a stash. They take them if they are called with that very tensor. What a model does is
not guessed beyond that: a group whose stash is not taken (in cross-attention q reads another x than k and v) is split.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..kernels.ops import LinearOp
from ..kernels.tuning import MAX_SLICES
from ..routing import Routing
from ..rows import RowState

# Names in one parent whose layers read the same x in the models of transformers. Only those that follow each other
# directly in the model, among the layers that carry adapters, become a group.
_FAMILIES: tuple[frozenset[str], ...] = tuple(
    frozenset(names.split())
    for names in (
        "q_proj k_proj v_proj g_proj gate_proj a_proj b_proj r_proj kv_a_proj_with_mqa",
        "gate_proj up_proj",
        "query key value",
        "q k v",
        "q_lin k_lin v_lin",
        "wq wk wv",
        "to_q to_k to_v to_kv",
        "linear_q linear_k linear_v",
        "query_proj key_proj value_proj",
        "project_q project_k project_v",
        "w1 w3",
        "wi_0 wi_1",
        "w_0 w_1",
        "c_fc_0 c_fc_1",
        "linear_x linear_y",
        "in_proj_qkv in_proj_z in_proj_b in_proj_a",
        "in_proj_qkvz in_proj_ba",
    )
)
# A forward that ends with a stash has failed, perhaps, or left out a layer for once. So many in a row are no accident.
_MISSES = 3


class Source(NamedTuple):
    """What the source of a parent shows.

    Attributes:
        same: it calls all members with one name.
        changed: what it calls them with may be changed in place, between two of them for all that is known.
    """

    same: bool
    changed: bool


class Stash:
    """Outputs of siblings that wait to be taken; one of a model's groups has one at a time, in `Routing.open`.

    Attributes:
        group: whose they are.
        x: the tensor that the base layers have read.
        ys: by member, None where taken.
        version: of x at that time; -1 where tensors have none (inference_mode, a graph).
        left: how many wait.
        traced: whether this happens in a graph, which changes nothing about its group.
    """

    __slots__ = ("group", "left", "traced", "version", "x", "ys")

    def __init__(
        self, group: Group, x: torch.Tensor, ys: list[torch.Tensor | None], version: int, traced: bool
    ) -> None:
        self.group, self.x, self.ys, self.version, self.traced = group, x, ys, version, traced
        self.left = len(ys) - 1

    def drop(self) -> None:
        """A forward has begun or ended while outputs wait: let them go; after several such forwards, split."""
        group = self.group
        group.misses += 1
        if group.misses < _MISSES:
            group.routing.open = None
        else:
            self.fail()

    def fail(self) -> None:
        """Not all members read x: from now on those that did are a group, and the others are, where possible."""
        group = self.group
        group.routing.open = None
        if torch.compiler.is_dynamo_compiling():  # a graph changes no structure; the next eager forward will
            group.trusted = group.proven = False
        else:
            group.split([y is None for y in self.ys])


class Group:
    """Wrappers of siblings in the order of their sites, and their op.

    Args:
        members: at least two wrappers with ops over one arena, whose sites follow each other.
        routing: their model's.
        source: what the parent's source says of x. Compiled forwards use only groups that it makes trusted, or
            that are proven in an eager forward: a graph must not end with a stash.

    Attributes:
        proven: all members have taken their outputs once.
        misses: forwards in a row that have ended with a stash.
    """

    apart = False  # whether compiled forwards serve each member alone

    __slots__ = (
        "__weakref__", "_dicts", "_direct", "bases", "changed", "members", "misses", "op", "proven", "routing",
        "sites", "trusted",
    )  # fmt: skip

    def __init__(self, members: Sequence[Any], routing: Routing, source: Source) -> None:
        self.members = tuple(members)
        self.bases: tuple[nn.Module, ...] = tuple(member.base_layer for member in members)
        self.sites: frozenset[int] = frozenset().union(*(member._sites for member in members))
        self.op = joined([member._op for member in members])
        self.routing = routing
        self.trusted = source.same and not source.changed
        self.changed = source.changed
        self.proven = False
        self.misses = 0
        self._direct = tuple(member._direct for member in members)
        self._dicts: tuple[dict[str, Any], ...] = tuple(member.__dict__ for member in members)
        for place, member in enumerate(members):
            member.__dict__.update(_group=self, _place=place)

    def lead(self, place: int, x: torch.Tensor, state: RowState) -> torch.Tensor | None:
        """Output of the member at `place`, the others' in a stash; None where it has to compute alone.

        The first dimension of x counts the rows of `state`, which has deltas only.
        """
        routing, op = self.routing, self.op
        unseen = x.is_inference()  # it has no version, by which a change between two members would be seen
        if unseen and self.changed:
            return None
        for attributes in self._dicts:
            # accelerate may have put a forward on members: offloaded weights are not there yet
            if "forward" in attributes or (unseen and _hooked(attributes)):
                return None
        if routing.open is not None:
            routing.open.fail()
        overlap, slots, rows = routing.overlap, state.tensor, state.rows
        h = op.begin(x, slots, rows) if overlap else None
        ys = tuple([run(x) for run in self._direct])
        if not self.proven and not self._suits(ys, x):
            return None
        ys = op.end(ys, x, h, slots, rows, state.memo) if overlap else op(ys, x, slots, rows, state.memo)
        waiting: list[torch.Tensor | None] = list(ys)
        waiting[place] = None
        routing.open = Stash(self, x, waiting, -1 if unseen else x._version, False)
        return ys[place]

    def trace(self, place: int, x: torch.Tensor, row_slots: torch.Tensor, rows: int) -> torch.Tensor:
        """The same in a compiled forward, where nothing else is stashed. Always an output: alone, where it has to."""
        if self.apart or any(_hooked(member.__dict__) for member in self.members):
            base, op = self.bases[place], self.members[place]._op
            h = None if self.routing.vectors else op.begin(x, row_slots, rows)
            y: torch.Tensor = op.end((base.forward(x),), x, h, row_slots, rows)[0]
            return y
        h = None if self.routing.vectors else self.op.begin(x, row_slots, rows)
        ys = self.op.end(tuple([base.forward(x) for base in self.bases]), x, h, row_slots, rows)
        waiting: list[torch.Tensor | None] = list(ys)
        waiting[place] = None
        self.routing.open = Stash(self, x, waiting, -1, True)
        return ys[place]

    def split(self, kinds: Sequence[Any]) -> None:
        """Make groups of consecutive members of one kind, where there are two or more; the others are on their own."""
        for member in self.members:
            member.__dict__["_group"] = None
        for run in _runs(zip(self.members, kinds, strict=True)):
            if len(run) > 1:
                type(self)(run, self.routing, Source(False, self.changed))

    def _suits(self, ys: Sequence[Any], x: torch.Tensor) -> bool:
        """Whether the base layers return what one op can add to; else the group is no more."""
        good = all(
            isinstance(y, torch.Tensor) and y.shape == (*x.shape[:-1], width)
            for y, width in zip(ys, self.op.outputs, strict=True)
        )
        if not good:
            self.split(range(len(self.members)))
        return good


class AlignedGroup(Group):
    """A group whose members have hooks of accelerate that only bring x to their device, as in a dispatched model.

    The hooks run around each member, and x, which lies there already, passes them as it is. Compiled forwards break at
    each hook, so that graphs would end with a stash.
    """

    apart = True

    __slots__ = ("_aligned",)

    def __init__(self, members: Sequence[Any], routing: Routing, source: Source) -> None:
        super().__init__(members, routing, source)
        self._aligned = [(attributes, attributes.get("forward")) for attributes in self._dicts]
        self._dicts = ()

    def lead(self, place: int, x: torch.Tensor, state: RowState) -> torch.Tensor | None:
        unseen = x.is_inference()
        for attributes, forward in self._aligned:
            if attributes.get("forward") is not forward or (unseen and _hooked(attributes)):
                return None
        return super().lead(place, x, state)


def _hooked(attributes: dict[str, Any]) -> bool:
    """Whether a module runs hooks around its forward: these may change its input in place."""
    return bool(attributes["_forward_pre_hooks"] or attributes["_forward_hooks"])


def joined(ops: Sequence[LinearOp]) -> LinearOp:
    """One op for layers whose sites follow each other."""
    widths = [width for op in ops for width in op.widths]
    return ops[0].over(widths, [output for op in ops for output in op.outputs])


def form_groups(wrappers: Iterable[tuple[nn.Module, str, Any]], routing: Routing) -> None:
    """Find the groups among wrappers that may be in one.

    Args:
        wrappers: (parent, attribute, wrapper), bound to ops of their own, in the order of their sites.
    """
    parents: dict[int, list[tuple[nn.Module, str, Any]]] = {}
    for item in wrappers:
        parents.setdefault(id(item[0]), []).append(item)
    for children in parents.values():
        grouped: set[str] = set()
        for family in _FAMILIES:
            named = {id(w): name for _, name, w in children if name in family and name not in grouped}
            for run in _runs((w, (type(w._op), w._op.in_features)) for _, _, w in children if id(w) in named):
                if len(run) > 1:
                    names = tuple(named[id(wrapper)] for wrapper in run)
                    grouped.update(names)
                    owner: Any = type(children[0][0])
                    hooked = any("_hf_hook" in wrapper.__dict__ for wrapper in run)
                    kind = AlignedGroup if hooked else Group
                    kind(run, routing, _source_of(owner, owner.forward, names))


def _runs(wrappers: Iterable[tuple[Any, Any]]) -> Iterator[list[Any]]:
    """Cut (wrapper, kind) into runs of one kind whose sites follow each other, of at most MAX_SLICES slices."""
    run: list[Any] = []
    before, slices = None, 0
    for wrapper, kind in wrappers:
        count = len(wrapper._op.widths)
        follows = bool(run) and wrapper._op.site == run[-1]._op.site + len(run[-1]._op.widths)
        if run and not (follows and kind == before and slices + count <= MAX_SLICES):
            yield run
            run, slices = [], 0
        run.append(wrapper)
        before, slices = kind, slices + count
    if run:
        yield run


# Ways to change a tensor in place: x *= y, x[i] = y, x.mul_(y), torch.relu_(x), out=x.
_CHANGES = (
    r"\b{x}\s*(?:[-+*/@%&|^]|//|\*\*|<<|>>)=|\b{x}\s*\[[^\]]*\]\s*(?:[-+*/@%&|^]|//|\*\*|<<|>>)?=(?!=)"
    r"|\b{x}(?:\.\w+)*\.\w*[a-z0-9]_\(|\w*[a-z0-9]_\(\s*{x}\b|\bout\s*=\s*{x}\b"
)


@functools.cache
def _source_of(owner: type[Any], forward: Any, names: tuple[str, ...]) -> Source:
    """What the source of a class, whose forward is this one, says of the argument that it calls these layers with."""
    sources: list[str] = []
    try:
        own = inspect.getsource(forward)
        for cls in owner.__mro__:
            if cls.__module__.startswith("torch."):
                break
            sources.append(inspect.getsource(cls))
    except (OSError, TypeError):
        return Source(False, True)
    # A forward that was put there later is what runs, whatever the class says.
    patched = not any(own in source for source in sources)
    for i, source in enumerate([own] if patched else sources):
        calls = [set(re.findall(rf"self\.{re.escape(name)}\(\s*([^()]*?)\s*\)", source)) for name in names]
        if all(calls):
            arguments = set().union(*calls)
            plain = all(argument.isidentifier() for argument in arguments)
            seen = [own, *sources[: i + 1]]
            changed = any(_changes(argument if plain else r"\w+", seen) for argument in arguments)
            return Source(plain and len(arguments) == 1, changed)
    return Source(False, _changes(r"\w+", [own, *sources]))


def _changes(name: str, sources: Iterable[str]) -> bool:
    pattern = _CHANGES.replace("{x}", name)
    return any(re.search(pattern, source) for source in sources)
