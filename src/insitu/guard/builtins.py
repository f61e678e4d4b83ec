"""Python's built-in functions, as a restricted block has them."""

from __future__ import annotations

import builtins
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from insitu.guard import names
from insitu.guard.allowed import Allowed, Kind
from insitu.guard.errors import NotAllowedError
from insitu.guard.text import formatted, text_of

if TYPE_CHECKING:
    from insitu.guard.runtime import Runtime

__all__ = ["BUILTINS", "Builtins"]

_MISSING: Any = object()
_PLACES = 400


class Builtins:
    """Of one run."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._meter = runtime.meter

    def table(self) -> dict[str, Any]:
        """What ``__builtins__`` is to the block's code."""
        found = dict(_of_every_run())
        for name, kind in _KINDS.items():
            found[name] = Kind(getattr(self, f"_{name}"), name, kind)
        for name in _OWN:
            found[name] = Allowed(getattr(self, f"_{name}"), name)
        return found

    # -- kinds ----------------------------------------------------------------------------

    def _list(self, items: Any = ()) -> list[Any]:
        made = list(self._runtime.iterable(items))
        self._meter.items(len(made))
        return made

    def _tuple(self, items: Any = ()) -> tuple[Any, ...]:
        return tuple(self._list(items))

    def _set(self, items: Any = ()) -> set[Any]:
        return set(self.members(items))

    def _frozenset(self, items: Any = ()) -> frozenset[Any]:
        return frozenset(self.members(items))

    def _dict(self, items: Any = (), **named: Any) -> dict[Any, Any]:
        return {**self.pairs(items), **named}

    def members(self, items: Any) -> list[Any]:
        """The items, each of which may be in a set."""
        return [self._runtime.operators.hashable(item) for item in self._list(items)]

    def pairs(self, items: Any) -> dict[Any, Any]:
        """What a dict is made of."""
        if isinstance(items, dict):
            self._meter.items(len(items))
            return dict(items)
        made: dict[Any, Any] = {}
        for pair in self._runtime.iterable(items):
            key, value = self._list(pair)
            made[self._runtime.operators.hashable(key)] = value
        return made

    def _str(self, value: Any = "") -> str:
        return text_of(value, self._meter, quoted=False)

    def _int(self, value: Any = 0, *base: int) -> int:
        if isinstance(value, (str, bytes)):
            self._meter.bits(4 * len(value))
        return int(value, *base)

    def _float(self, value: Any = 0.0) -> float:
        return float(value)

    def _bool(self, value: Any = False) -> bool:
        return bool(value)

    def _complex(self, *parts: Any) -> complex:
        return complex(*parts)

    def _range(self, *bounds: int) -> range:
        made = range(*bounds)
        if abs(made.start) > 1 << 62 or abs(made.stop) > 1 << 62 or len(made) > self._meter.limits.items:
            self._meter.items(self._meter.limits.items + 1)
        return made

    def _slice(self, *bounds: Any) -> slice:
        if not all(bound is None or isinstance(bound, (int, torch.Tensor)) for bound in bounds):
            raise TypeError("a slice goes from an int to an int")
        return slice(*bounds)

    # -- functions ------------------------------------------------------------------------

    def _repr(self, value: Any) -> str:
        return text_of(value, self._meter)

    def _format(self, value: Any, spec: str = "") -> str:
        return formatted(value, -1, spec, self._meter)

    def _pow(self, base: Any, exponent: Any, *modulus: int) -> Any:
        if not modulus:
            return self._runtime.operators.binary("**", base, exponent)
        for part in (base, exponent, *modulus):
            self._meter.bits(part.bit_length() if isinstance(part, int) else 0)
        self._meter.clock()
        return pow(base, exponent, *modulus)

    def _round(self, value: Any, places: Any = None) -> Any:
        if places is not None and not isinstance(places, int):
            raise TypeError(f"`round` to a number of places, not to a {type(places).__name__}")
        if places is not None and abs(places) > _PLACES:
            raise NotAllowedError(f"`round` to at most {_PLACES} places")
        if isinstance(value, torch.Tensor):
            return value.round(decimals=places or 0)
        return round(value, places)

    def _divmod(self, a: Any, b: Any) -> Any:
        binary = self._runtime.operators.binary
        return binary("//", a, b), binary("%", a, b)

    def _sum(self, items: Any, start: Any = 0) -> Any:
        if isinstance(start, (str, bytes)):
            raise TypeError("sum() can't sum texts: use join")
        total = start
        for item in self._runtime.iterable(items):
            total = self._runtime.operators.binary("+", total, item)
        return total

    def _all(self, items: Any) -> bool:
        return all(self._runtime.iterable(items))

    def _any(self, items: Any) -> bool:
        return any(self._runtime.iterable(items))

    def _max(self, *items: Any, key: Any = None, default: Any = _MISSING) -> Any:
        return self._best(max, items, key, default)

    def _min(self, *items: Any, key: Any = None, default: Any = _MISSING) -> Any:
        return self._best(min, items, key, default)

    def _best(self, choose: Callable[..., Any], items: Any, key: Any, default: Any) -> Any:
        found = self._list(items[0] if len(items) == 1 else items)
        self._runtime.operators.walk(found)
        settings = {} if default is _MISSING else {"default": default}
        return choose(found, key=self._called(key), **settings)

    def _sorted(self, items: Any, *, key: Any = None, reverse: Any = False) -> list[Any]:
        return self._runtime.sorted(items, key=key, reverse=reverse)

    def _called(self, key: Any) -> Any:
        return None if key is None else partial(self._runtime.call, key)

    def _reversed(self, items: Any) -> Iterator[Any]:
        return self._meter.each(reversed(self._list(items)))

    def _enumerate(self, items: Any, start: int = 0) -> Iterator[Any]:
        return enumerate(self._runtime.iterable(items), start)

    def _zip(self, *items: Any, strict: bool = False) -> Iterator[Any]:
        return _zipped([self._runtime.iterable(each) for each in items], strict)

    def _map(self, function: Any, *items: Any) -> Iterator[Any]:
        return (self._runtime.call(function, *each) for each in self._zip(*items))

    def _filter(self, function: Any, items: Any) -> Iterator[Any]:
        wanted = bool if function is None else partial(self._runtime.call, function)
        return (item for item in self._runtime.iterable(items) if wanted(item))

    def _iter(self, items: Any) -> Iterator[Any]:
        return iter(self._runtime.iterable(items))

    def _next(self, items: Any, *default: Any) -> Any:
        if not isinstance(items, Iterator):
            raise TypeError(f"a {type(items).__name__} is no iterator")
        return next(items, *default)

    def _len(self, value: Any) -> int:
        return len(value)

    def _isinstance(self, value: Any, kinds: Any) -> bool:
        wanted = kinds if isinstance(kinds, tuple) else (kinds,)
        found = []
        for kind in wanted:
            if isinstance(kind, Kind):
                found.append(kind.kind)
            elif isinstance(kind, type) and issubclass(kind, Exception):
                found.append(kind)
            else:
                raise NotAllowedError("`isinstance` takes int, str, list and the like, torch.Tensor, or an exception")
        return isinstance(value, tuple(found))

    def _getattr(self, value: Any, name: str, *default: Any) -> Any:
        if not default:
            return self._runtime.attribute(value, name)
        try:
            return self._runtime.attribute(value, name)
        except (AttributeError, NotAllowedError):
            return default[0]

    def _hasattr(self, value: Any, name: str) -> bool:
        return self._getattr(value, name, _MISSING) is not _MISSING

    def _callable(self, value: Any) -> bool:
        return self._runtime.is_callable(value)


_PLAIN = ("abs", "chr", "ord", "bin", "hex", "oct")
_KINDS: Mapping[str, type] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, dict, str, int, float, bool, complex, range, slice)
}
_OWN = ("repr", "format", "pow", "round", "divmod", "sum", "all", "any", "max", "min", "sorted", "reversed")
_OWN += ("enumerate", "zip", "map", "filter", "iter", "next", "len", "isinstance", "getattr", "hasattr", "callable")
BUILTINS = frozenset((*_PLAIN, *_KINDS, *_OWN, *names.EXCEPTIONS, "NotImplemented", "Ellipsis"))
"""The names of those that a restricted block has."""


@functools.cache
def _of_every_run() -> Mapping[str, Any]:
    found: dict[str, Any] = {name: getattr(builtins, name) for name in names.EXCEPTIONS}
    found |= {"NotImplemented": NotImplemented, "Ellipsis": ..., "True": True, "False": False, "None": None}
    found["__import__"] = _imported  # no name of a block begins with an underscore
    return found | {name: Allowed(getattr(builtins, name), name) for name in _PLAIN}


def _imported(name: str, *_: Any) -> None:
    """What torch's own code in C looks a module of its own up by, from wherever it is called: in ``if x > 0:`` from
    the block. It takes the module itself from ``sys.modules``."""
    if name.partition(".")[0] != "torch" or name not in sys.modules:
        raise ImportError(f"`{name:.60}` can't be imported in a restricted block")


def _zipped(iterators: list[Iterator[Any]], strict: bool) -> Iterator[Any]:
    return zip(*iterators, strict=strict)
