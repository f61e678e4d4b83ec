"""What the code of a restricted block calls instead of doing things itself: one of these for each run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType, GeneratorType
from typing import Any

import torch
from RestrictedPython.Guards import guarded_iter_unpack_sequence, guarded_unpack_sequence

from insitu.block import Saves
from insitu.block.saves import SAVE_NAME
from insitu.guard.allowed import Allowed, Kind
from insitu.guard.attributes import attribute, require_stateless
from insitu.guard.builtins import Builtins
from insitu.guard.errors import Exceeded, LimitError, NotAllowedError, catchable
from insitu.guard.kinds import is_of
from insitu.guard.limits import GuardLimits
from insitu.guard.meter import Meter
from insitu.guard.methods import data_size
from insitu.guard.operators import Operators, walked
from insitu.guard.text import formatted, make_plain
from insitu.guard.watch import Watch
from insitu.guard.writer import Writer
from insitu.run import tensors_of, traps
from insitu.tree import LayerStream, Node, current
from insitu.tree.cache import Cache, Cached

__all__ = ["Runtime", "size_of"]

_REFUSED_KEYWORDS = ("out", "pin_memory", "generator", "layout", "names")
_FUNCTIONS = ("insitu.guard.code.GuardedFunction",)
_SERVING = ("insitu.tree.call.Call", "insitu.tree.model_places.ModelPlaces")
_OWN_VALUES = ("list", "tuple", "dict", "set", "frozenset", "str", "bytes", "range")
_MANY = 32
_APPLIED = ("model.unembed", "model.apply_final_norm")
_STEPS = ("insitu.engine.client.steps.Steps", "insitu.engine.client.steps.StepLoop")


class Runtime:
    """One run of one block, with its meter."""

    writable: tuple[type, ...] = (torch.Tensor, LayerStream)
    """What has items that may be assigned, beside lists and dicts."""

    def __init__(self, limits: GuardLimits, saves: Saves | None = None) -> None:
        self.meter: Meter = Meter(limits)
        self.operators: Operators = Operators(self.meter, self.iterable)
        self.builtins: Builtins = Builtins(self)
        self._watch = Watch(self.meter)
        self._saves = saves
        self._own: dict[CodeType, None] = {}
        self._functions: dict[int, tuple[Any, FunctionType]] = {}
        self._table = self.builtins.table()

    def globals(self, code: CodeType, values: Mapping[str, Any], module_name: str = "<client>") -> dict[str, Any]:
        """The dict that code runs in. ``code``'s functions are those that the block may call."""
        self._adopt(code)
        return {**values, **self._helpers(), "__builtins__": self._table, "__name__": module_name}

    def _adopt(self, code: CodeType) -> None:
        self._own[code] = None
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._adopt(constant)

    def _helpers(self) -> dict[str, Any]:
        return {
            "_getattr_": self.attribute,
            "_getitem_": self.item,
            "_getiter_": self.iterable,
            "_iter_unpack_sequence_": guarded_iter_unpack_sequence,
            "_unpack_sequence_": guarded_unpack_sequence,
            "_write_": partial(Writer, self),
            "_inplacevar_": self.operators.inplace,
            "_augmented_attr_": self.augmented_attribute,
            "_augmented_item_": self.augmented_item,
            "_binary_": self.operators.binary,
            "_unary_": self.operators.unary,
            "_compare_": self.operators.compare,
            "_call_": self.call,
            "_mapping_": self.mapping,
            "_joined_": self.joined,
            "_format_": self.formatted,
            "_tick_": self.meter.tick,
            "_hashable_": self.operators.hashable,
            "_members_": self.builtins.members,
            "_counted_": self.counted,
            "_catchable_": catchable,
            "_entered_": self.entered,
            SAVE_NAME: self.mark,
        }

    @contextmanager
    def active(self) -> Iterator[None]:
        """The block runs in it. Raises ``LimitError`` for one that has gone beyond a limit."""
        session: Any = current.get()
        if session is not None:
            session.withholds, session.room = True, self.meter.limits.saved_bytes
        token = traps.around.set(self._paused)
        self.meter.start()
        self._enter()
        try:
            yield
        except Exceeded as error:
            raise self._limit(error) from None
        except Exception as error:
            try:
                make_plain(error, self.meter)
            except Exceeded as exceeded:
                raise self._limit(exceeded) from None
            raise
        finally:
            self._leave()
            self.meter.pause()
            traps.around.reset(token)
        if self.meter.exceeded is not None:
            raise self._limit(None)

    def _limit(self, error: Exceeded | None) -> LimitError:
        made = LimitError(f"this block was stopped: {self.meter.exceeded}")
        return made if error is None else made.with_traceback(error.__traceback__)

    def _paused(self) -> Any:
        return self.meter.paused(self._leave, self._enter)

    def _enter(self) -> None:
        self._watch.__enter__()

    def _leave(self) -> None:
        self._watch.__exit__(None, None, None)

    # -- attributes and items -------------------------------------------------------------

    def attribute(self, value: Any, name: str) -> Any:
        self.meter.tick()
        found = attribute(self, value, name)
        return self.taken(found) if is_of(value, _SERVING) else found

    def taken(self, value: Any) -> Any:
        """A value that the block gets from outside: its tensors count as held."""
        for tensor in tensors_of(value):
            self.meter.hold(tensor)
        return value

    def item(self, value: Any, index: Any) -> Any:
        self.meter.tick()
        if isinstance(value, torch.Tensor):
            return value[self.index(index)]
        if isinstance(value, dict):
            return value[self.operators.hashable(index)]
        if isinstance(value, (list, tuple, str, bytes, range)):
            if isinstance(index, slice):
                self._charge(value, len(range(*index.indices(len(value)))))
            return value[index]
        if isinstance(value, (Node, LayerStream, Cache, Cached)) or is_of(value, _STEPS[:1]):
            self.operators.given(index)
            return self.taken(value[index])
        raise NotAllowedError(f"a {type(value).__name__} has no items for a restricted block")

    def index(self, index: Any) -> Any:
        """An index of a tensor, whose lists torch makes tensors of."""
        if isinstance(index, (list, tuple)):
            self.operators.walk(index)
            self.meter.allocate(8 * data_size(index), "an index")
        return index

    def _charge(self, value: Any, count: int) -> None:
        if isinstance(value, (str, bytes)):
            self.meter.text(count)
        else:
            self.meter.items(count)

    def augmented_attribute(self, value: Any, name: str) -> Any:
        old = self.attribute(value, name)
        return lambda symbol, other: setattr(Writer(self, value), name, self.operators.inplace(symbol, old, other))

    def augmented_item(self, value: Any, index: Any) -> Any:
        old = self.item(value, index)

        def apply(symbol: str, other: Any) -> None:
            Writer(self, value)[index] = self.operators.inplace(symbol, old, other)

        return apply

    # -- iteration ------------------------------------------------------------------------

    def iterable(self, value: Any) -> Iterator[Any]:
        """Its items, each counted."""
        self.meter.tick()
        return self.meter.each(self._items(value))

    def _items(self, value: Any) -> Iterable[Any]:
        if isinstance(value, torch.Tensor):
            self.meter.items(value.shape[0] if value.dim() else 0)
            return iter(value)
        if isinstance(value, (list, tuple, dict, set, frozenset, str, bytes, range, GeneratorType, zip, enumerate)):
            return value
        if isinstance(value, LayerStream):
            return map(self.taken, value)
        if isinstance(value, (Node, Cache, Cached)) or is_of(value, _STEPS[1:]):
            return value
        raise NotAllowedError(f"a {type(value).__name__} can't be looped over in a restricted block")

    def entered(self, manager: Any) -> Iterator[Any]:
        """The steps of ``with tracer.iter[...]``."""
        if not is_of(manager, _STEPS[1:]):
            raise NotAllowedError(
                "`with` in a restricted block takes tracer.iter[...], tracer.all() and torch.no_grad(); "
                f"not a {type(manager).__name__}"
            )
        return self.iterable(manager)

    def mapping(self, value: Any) -> dict[str, Any]:
        """What ``**`` takes."""
        if not isinstance(value, dict):
            raise TypeError(f"`**` takes a dict, not a {type(value).__name__}")
        self.meter.items(len(value))
        return value

    def counted(self, made: Any) -> Any:
        """A container that was written out."""
        self.meter.tick()
        self.meter.items(len(made))
        return made

    def sorted(self, items: Any, *, key: Any, reverse: Any) -> list[Any]:
        found = list(self.iterable(items))
        self.meter.items(len(found))
        if key is None:
            self.operators.walk(found)
        return sorted(found, key=None if key is None else partial(self.call, key), reverse=bool(reverse))

    # -- calls ----------------------------------------------------------------------------

    def call(self, function: Any, /, *args: Any, **named: Any) -> Any:
        self.meter.tick()
        if len(args) > _MANY:
            self.meter.items(len(args))
        kind = type(function)
        if kind is FunctionType and function.__code__ in self._own:
            return function(*args, **named)
        if isinstance(function, Allowed):
            if function.name in _APPLIED:
                return self._apply(function.function, args, named)
            if function.watched:
                return self._call_torch(function, args, named)
            if "." in function.name and function.name.partition(".")[0] not in _OWN_VALUES:
                self.operators.given(*args, *named.values())
            return function.function(*args, **named)
        if is_of(function, _FUNCTIONS):
            return self.instance(function)(*args, **named)
        if isinstance(function, Node):
            require_stateless(function)
            return self._apply(function, args, named)
        if isinstance(function, LayerStream):
            self.operators.given(*args, *named.values())
            return self.taken(function(*args, **named))
        if isinstance(function, type) and self._table.get(function.__name__) is function:
            return function(*args, **named)  # an exception
        raise NotAllowedError(f"a {kind.__name__} can't be called in a restricted block")

    def _apply(self, function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The model's own code, whose operations are its own, on so many rows at most."""
        self.operators.given(*args, *named.values())
        for tensor in tensors_of((args, named)):
            rows = tensor.numel() // max(tensor.shape[-1] if tensor.dim() > 1 else 1, 1)
            if rows > self.meter.limits.rows:
                raise NotAllowedError(f"a module is called with {rows} rows; {self.meter.limits.rows} are the most")
        self._leave()
        try:
            made = function(*args, **named)
        finally:
            self._enter()
        return self.taken(made)

    def _call_torch(self, function: Allowed, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        _require_keywords(function.name, named)
        self.operators.given(*args, *named.values())
        if function.name in ("torch.tensor", "torch.as_tensor") and args:
            self.meter.allocate(8 * data_size(args[0]), function.name)
        # `dtype=float` means Python's own class.
        args = tuple(each.kind if isinstance(each, Kind) else each for each in args)
        named = {name: each.kind if isinstance(each, Kind) else each for name, each in named.items()}
        return function.function(*args, **named)

    def is_callable(self, value: Any) -> bool:
        own = isinstance(value, FunctionType) and value.__code__ in self._own
        return own or isinstance(value, (Allowed, Node)) or is_of(value, _FUNCTIONS)

    def instance(self, function: Any) -> FunctionType:
        """The function of a client's, as this run has it."""
        known = self._functions.get(id(function))
        if known is None:
            code, names, name = function.guarded()
            names = self.shown(names)
            namespace = self.globals(code, names)
            exec(code, namespace)
            made = namespace[name]
            namespace.update(names)  # it may be known there by another name, or its name mean something else
            made.__defaults__, made.__kwdefaults__ = function.defaults, dict(function.kwdefaults)
            known = self._functions[id(function)] = (function, made)
        return known[1]

    def shown(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the block sees of values of its caller's."""
        return values

    def mark(self, value: Any, *names: str) -> Any:
        """``value.save()``."""
        self.meter.tick()
        if self._saves is None:
            raise NotAllowedError("in a function write insitu.save(x), or return the value")
        if isinstance(value, Cache):
            return value.save()
        return self._saves.keep(value, *names, frame=sys._getframe(1))

    def require_savable(self, values: Iterable[Any]) -> None:
        """Raises ``LimitError`` if these are more than a block may save."""
        size, seen = 0, set[int]()
        try:
            for part in walked(list(values)):
                self.meter.tick()
                if isinstance(part, Cache):
                    size += sum(size_of(inner, seen) for inner in walked(part.as_data()))
                size += size_of(part, seen)
                if size > self.meter.limits.saved_bytes:
                    self.meter.stop(f"it saves more than {self.meter.limits.saved_bytes} bytes")
        except Exceeded:
            raise self._limit(None) from None

    # -- texts ----------------------------------------------------------------------------

    def joined(self, *parts: str) -> str:
        self.meter.tick()
        self.meter.text(sum(map(len, parts)))
        return "".join(parts)

    def formatted(self, value: Any, conversion: int, spec: str) -> str:
        self.meter.tick()
        return formatted(value, conversion, spec, self.meter)


def _require_keywords(name: str, named: Mapping[str, Any]) -> None:
    for keyword in _REFUSED_KEYWORDS:
        if keyword in named:
            raise NotAllowedError(f"`{keyword}=` of `{name}` is not in the list of what a restricted block may use")


def size_of(value: Any, seen: set[int]) -> int:
    """How many bytes it counts as where it is saved; a tensor once."""
    if isinstance(value, torch.Tensor):
        if id(value) in seen:
            return 0
        seen.add(id(value))
        return value.numel() * value.element_size()
    return len(value) if isinstance(value, (str, bytes)) else 16
