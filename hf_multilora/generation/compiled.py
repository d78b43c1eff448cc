"""The step that generate() compiles itself, without the guards that Dynamo puts on the insides of wrapped layers.

Guards are evaluated at each step, and those on the insides (parameters, base layers, ops, groups) are most of all:
some twenty for each wrapped layer. What they see does not change while one generate() decodes, so it is compared once,
at its first step. All others stay: inputs, cache, globals, the rest of the model, all that `Routing` holds.

A graph without these guards would pass for any model of the same shape. So every compilation is one of a function with
a code object of its own, where Dynamo keeps its graphs; and guards are left out in frames of that very function only,
which are known by the name of its argument. (A forward that breaks goes on in frames that models share.)
"""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..layers import LoraLayer
from ..routing import Routing
from .cache import find_cache
from .kept_caches import MAX_COMPILED, KeptCaches
from .obstacles import PLAIN, obstacle_for_all, obstacle_of
from .static_cache import NotCapturable

# Whether a generate() of an enabled model is running. Others who ask a model for its compiled call may keep it for
# longer than a generate(), over changes that nobody would see.
generating: ContextVar[bool] = ContextVar("hf_multilora_generating", default=False)

MAX_KEPT = 4  # compiled functions of one model: under different settings, or for different insides
_numbers = itertools.count()


class CompiledSteps:
    """Compiled steps of one model, the latest last: what each was compiled with and what it takes for granted.

    Attributes:
        caches: tensors of static caches. A CUDA graph is recorded anew for tensors at other addresses, and those of a
            new cache may lie anywhere.
    """

    def __init__(self) -> None:
        self.caches = KeptCaches(MAX_COMPILED)
        self._kept: list[tuple[Any, Hashable, Callable[..., Any]]] = []

    def begin(self, model: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of one generate().

        Args:
            plain: what transformers has compiled, or would run: it serves where something is in the way.
        """
        settings = model.__dict__.get("_last_compile_config")
        if settings is None or getattr(plain, "_torchdynamo_orig_callable", None) != model.__call__:
            return plain  # transformers compiles nothing here, or others have put a call of their own there
        return _Step(self, model, plain, settings)

    def find(self, model: Any, plain: Callable[..., Any], settings: Any) -> Callable[..., Any]:
        """`plain`, or one that does the same with fewer guards: compiled before, if nothing has changed."""
        found = insides(model)
        if found is None:
            return plain
        for place, (other, given, compiled) in enumerate(self._kept):
            if given == found and other == settings:
                self._kept.append(self._kept.pop(place))
                return compiled
        compiled = _compile(settings.to_dict())
        if compiled is None:
            return plain
        self._kept = [*self._kept[-MAX_KEPT + 1 :], (settings, found, compiled)]
        return compiled

    def clear(self) -> None:
        """Let go of everything, and of the memory that graphs hold."""
        self._kept.clear()
        self.caches.clear()


class _Step:
    """The forward of one generate(), which finds its compiled function at the first step: the prompt, which runs
    before and is not compiled, may still settle which layers are siblings."""

    def __init__(self, steps: CompiledSteps, model: Any, plain: Callable[..., Any], settings: Any) -> None:
        self._find = (steps, model, plain, settings)
        self._run: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._run is None:
            steps, model, plain, settings = self._find
            found = steps.find(model, plain, settings)
            cache = find_cache(kwargs)
            if cache is not None:
                with suppress(NotCapturable):
                    steps.caches.view(cache)
            self._run = found if found is plain else functools.partial(found, model)
        return self._run(*args, **kwargs)


def _forward(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model.__call__(*args, **kwargs)


def _compile(settings: dict[str, Any]) -> Any:
    """torch.compile of the model's call, for the model as the first argument; None where guards cannot be chosen."""
    backend, mode = settings.get("backend", "inductor"), settings.pop("mode", None)
    options = dict(settings.pop("options", None) or {})
    if mode in (None, "default"):
        pass
    elif backend == "inductor":  # a mode is options, and torch.compile takes one or the other
        from torch._inductor import list_mode_options

        options = {**list_mode_options(mode, settings.get("dynamic")), **options}
    else:
        return None  # a mode that only this backend knows
    if options.get("use_aoti") or options.get("freezing") or not _weights_are_inputs():
        return None
    name = f"model_{next(_numbers)}"
    code = _forward.__code__.replace(co_varnames=(name, *_forward.__code__.co_varnames[1:]))
    options["guard_filter_fn"] = _Filter(name, options.get("guard_filter_fn"))
    return torch.compile(FunctionType(code, globals(), _forward.__name__), options=options, **settings)


class _Filter:
    """Chooses the guards of a frame: which of them to keep.

    Args:
        name: the argument that holds the model. Frames without it keep all guards.
        users: the user's own filter, if any; what it drops goes as well.
    """

    def __init__(self, name: str, users: Callable[[Sequence[Any]], Sequence[bool]] | None = None) -> None:
        self._name = name
        self._users = users

    def __call__(self, guards: Sequence[Any]) -> list[bool]:
        wrapped = {_name(guard) for guard in guards if issubclass(type(guard.value), LoraLayer)}
        routing = {_name(guard) for guard in guards if issubclass(type(guard.value), Routing)}
        kept = [not self._inside(guard.orig_guard.originating_source, wrapped, routing) for guard in guards]
        if self._users is None:
            return kept
        return [own and users for own, users in zip(kept, self._users(guards), strict=True)]

    def _inside(self, source: Any, wrapped: set[str], routing: set[str]) -> bool:
        """Whether a source is a wrapped layer or belongs to one, and to the insides that `insides` compares."""
        inside, leaf = False, True
        while True:
            base = getattr(source, "base", None)
            name = _text(source)
            if not inside and not leaf and name in routing:
                return False
            inside = inside or name in wrapped
            if base is None:
                return inside and getattr(source, "local_name", None) == self._name
            source, leaf = base, False


def _name(guard: Any) -> str:
    return _text(guard.orig_guard.originating_source)


def _text(source: Any) -> str:
    name = source.name
    return str(name() if callable(name) else name)


def _weights_are_inputs() -> bool:
    """Whether graphs read weights where they are at each call, instead of holding those that they were traced with."""
    import torch._inductor.config

    if torch._inductor.config.freezing or torch._dynamo.config.prepare_freezing:
        return False
    with warnings.catch_warnings():  # later versions of torch always do, and say so
        warnings.simplefilter("ignore", FutureWarning)
        return bool(getattr(torch._dynamo.config, "inline_inbuilt_nn_modules", True))


def insides(model: nn.Module) -> Hashable:
    """What graphs take for granted of a model's wrapped layers, and of all modules in them; None where something is
    in the way of knowing it (hooks, patched forwards, tensors of other kinds, objects of which nothing is known)."""
    if obstacle_for_all() is not None:
        return None
    given: list[Hashable] = []
    try:
        for module in _inner(model):
            if obstacle_of(module) is not None:
                return None
            _take(module, given)
    except _Unknown:
        return None
    return tuple(given)


class _Unknown(Exception):
    """An attribute whose changes nobody would see."""


# What every module has, as nn.Module makes it: hooks are looked for, tensors and sub-modules are taken one by one.
_USUAL = frozenset(nn.Module().__dict__) - {"training"}
_OURS = ("base_layer", "_op", "_group", "_routing")  # known by identity: these objects do not change
_ASIDE = frozenset(("_before", "_kept", "_seam"))  # for the way back to the base layer; no forward reads them
_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)


def _take(module: nn.Module, given: list[Hashable]) -> None:
    kind: Any = type(module)
    # Hooks that are there all the same do no harm, and their numbers never come again.
    given += [kind, kind.forward, tuple(module._forward_hooks), tuple(module._forward_pre_hooks)]
    for name, value in module.__dict__.items():
        if name in _USUAL or (name in _ASIDE and isinstance(module, LoraLayer)):
            continue
        if name in _OURS and isinstance(module, LoraLayer):
            given += [name, None if value is None else weakref.ref(value)]
        else:
            given += [name, _value(value)]
    group: Any = module.__dict__.get("_group")
    if group is not None:
        given.append(bool(group.trusted or group.proven))
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            given.append(name)
            if tensor is None:
                given.append(None)
            elif type(tensor) in _TENSORS and tensor.layout is torch.strided:
                given += [type(tensor), tensor.dtype, tensor.device, tensor.requires_grad]
                given += [tensor.shape, tensor.stride()]
            else:
                raise _Unknown


def _value(value: Any) -> Hashable:
    if type(value) in PLAIN:
        return value
    if type(value) in (tuple, list, torch.Size):
        return (type(value), *map(_value, value))
    if type(value) in (set, frozenset):
        return frozenset(map(_value, value))
    raise _Unknown


def _inner(model: nn.Module) -> Iterator[nn.Module]:
    """The wrapped layers of a model in order, each with its base layer and all that it holds."""
    seen: set[tuple[int, bool]] = set()
    todo = [(model, False)]
    while todo:
        module, inside = todo.pop()
        if isinstance(module, LoraLayer):
            inside = True
            yield module.base_layer
        if (id(module), inside) in seen:
            continue
        seen.add((id(module), inside))
        if inside:
            yield module
        todo += [(child, inside) for child in module._modules.values() if child is not None]
