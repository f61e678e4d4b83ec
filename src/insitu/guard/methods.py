"""Methods of Python's own values that may make something large, or that call or consume what they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from insitu.guard.runtime import Runtime

__all__ = ["METHODS", "data_size"]

Method = Callable[..., Any]
_MOST_AXES = 64


def _extend(runtime: Runtime, self: list[Any], items: Any) -> None:
    found = list(runtime.iterable(items))
    runtime.meter.items(len(self) + len(found))
    self.extend(found)


def _insert(runtime: Runtime, self: list[Any], index: int, value: Any) -> None:
    runtime.meter.tick(1 + len(self) // 64)
    self.insert(index, value)


def _sort(runtime: Runtime, self: list[Any], *, key: Any = None, reverse: Any = False) -> None:
    self[:] = runtime.sorted(self, key=key, reverse=reverse)


def _searching(name: str) -> Callable[[Runtime], Method]:
    def method(runtime: Runtime, self: Any, value: Any, *bounds: int) -> Any:
        runtime.operators.walk(self)
        runtime.operators.walk(value)
        return getattr(self, name)(value, *bounds)

    return lambda runtime: method


def _copy(runtime: Runtime, self: Any) -> Any:
    runtime.meter.items(len(self))
    return self.copy()


def _reverse(runtime: Runtime, self: list[Any]) -> None:
    runtime.meter.tick(1 + len(self) // 64)
    self.reverse()


def _pop(runtime: Runtime, self: Any, *args: Any) -> Any:
    runtime.meter.tick(1 + len(self) // 1024)
    if args and isinstance(self, dict):
        runtime.operators.hashable(args[0])
    return self.pop(*args)


def _keyed(name: str) -> Method:
    def method(runtime: Runtime, self: Any, key: Any, *default: Any) -> Any:
        return getattr(self, name)(runtime.operators.hashable(key), *default)

    return method


def _update(runtime: Runtime, self: dict[Any, Any], other: Any = (), **named: Any) -> None:
    self.update(runtime.builtins.pairs(other), **named)
    runtime.meter.items(len(self))


def _of_sets(name: str) -> Method:
    def method(runtime: Runtime, self: Any, *others: Any) -> Any:
        found = [runtime.builtins.members(other) for other in others]
        runtime.meter.items(len(self) + sum(map(len, found)))
        return getattr(self, name)(*found)

    return method


def _view(name: str) -> Method:
    def method(runtime: Runtime, self: dict[Any, Any]) -> Any:
        runtime.meter.items(len(self))
        return list(getattr(self, name)())

    return method


def _join(runtime: Runtime, self: str, parts: Any) -> str:
    found = list(runtime.iterable(parts))
    if all(isinstance(part, str) for part in found):
        runtime.meter.text(sum(map(len, found)) + len(self) * max(len(found) - 1, 0))
    return self.join(found)


def _replace(runtime: Runtime, self: str, old: str, new: str, count: int = -1) -> str:
    times = self.count(old) if isinstance(old, str) else 0
    times = min(times, count) if isinstance(count, int) and count >= 0 else times
    if isinstance(new, str):
        runtime.meter.text(len(self) + times * max(len(new) - len(old), 0))
    return self.replace(old, new, count)


def _padded(name: str) -> Method:
    def method(runtime: Runtime, self: str, width: int, *fill: str) -> str:
        runtime.meter.text(max(len(self), width))
        return getattr(self, name)(width, *fill)

    return method


def _sized(name: str) -> Method:
    """A method whose result is at most a few times as large as the text."""

    def method(runtime: Runtime, self: Any, *args: Any, **named: Any) -> Any:
        runtime.meter.text(4 * len(self))
        return getattr(self, name)(*args, **named)

    return method


def _to_list(runtime: Runtime, self: torch.Tensor) -> Any:
    runtime.meter.items(self.numel())
    return self.tolist()


def _view_tensor(runtime: Runtime, self: torch.Tensor, *shape: Any) -> torch.Tensor:
    if any(isinstance(part, torch.dtype) for part in shape):
        raise TypeError("Tensor.view takes a shape in a restricted block: `to` converts to another dtype")
    return self.view(*shape)


def _new_tensor(runtime: Runtime, self: torch.Tensor, data: Any, *args: Any, **named: Any) -> torch.Tensor:
    runtime.meter.allocate(8 * data_size(data), "new_tensor")
    return self.new_tensor(data, *args, **named)


def data_size(data: Any) -> int:
    """How many elements a tensor of these nested lists has."""
    size = 1
    for _ in range(_MOST_AXES):
        if not isinstance(data, (list, tuple)) or not data:
            break
        size *= len(data)
        data = data[0]
    return size


def _searcher(name: str) -> Method:
    return _searching(name)(None)  # type: ignore[arg-type]


def _coded(name: str) -> Method:
    """``encode`` and ``decode``, which would look for a module of any other name."""

    def method(runtime: Runtime, self: Any, encoding: str = "utf-8", errors: str = "strict") -> Any:
        if encoding.lower() not in ("utf-8", "utf8", "ascii", "latin-1") or errors not in (
            "strict",
            "ignore",
            "replace",
        ):
            raise ValueError("texts are encoded in utf-8, ascii or latin-1")
        runtime.meter.text(4 * len(self))
        return getattr(self, name)(encoding, errors)

    return method


_TEXTS = (
    "capitalize casefold lower lstrip partition removeprefix removesuffix rpartition rsplit rstrip split "
    "splitlines strip swapcase title upper"
)
METHODS: Mapping[str, Mapping[str, Method]] = {
    "builtins.list": {
        "extend": _extend,
        "insert": _insert,
        "sort": _sort,
        "copy": _copy,
        "reverse": _reverse,
        "pop": _pop,
        **{name: _searcher(name) for name in ("index", "count", "remove")},
    },
    "builtins.tuple": {name: _searcher(name) for name in ("index", "count")},
    "builtins.range": {name: _searcher(name) for name in ("index", "count")},
    "builtins.dict": {
        "get": _keyed("get"),
        "setdefault": _keyed("setdefault"),
        "pop": _pop,
        "update": _update,
        "copy": _copy,
        **{name: _view(name) for name in ("keys", "values", "items")},
    },
    "builtins.set": {
        "copy": _copy,
        **{name: _keyed(name) for name in ("add", "discard", "remove")},
        **{name: _of_sets(name) for name in ("update", "union", "intersection", "difference")},
        **{name: _of_sets(name) for name in ("symmetric_difference", "issubset", "issuperset", "isdisjoint")},
    },
    "builtins.frozenset": {
        "copy": _copy,
        **{name: _of_sets(name) for name in ("union", "intersection", "difference", "symmetric_difference")},
        **{name: _of_sets(name) for name in ("issubset", "issuperset", "isdisjoint")},
    },
    "builtins.str": {
        "join": _join,
        "replace": _replace,
        "encode": _coded("encode"),
        **{name: _padded(name) for name in ("ljust", "rjust", "center", "zfill")},
        **{name: _sized(name) for name in _TEXTS.split()},
    },
    "builtins.bytes": {"decode": _coded("decode"), "hex": _sized("hex")},
    "torch.Tensor": {"tolist": _to_list, "view": _view_tensor, "new_tensor": _new_tensor},
}
"""Each is called with the run, the value and what the block gives. Other methods in the list are Python's own."""
