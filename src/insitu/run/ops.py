"""Which forwards stop at their operations in this step, and which operations have gone by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import BuiltinMethodType, MethodType
from typing import Any

import torch

from insitu.block import LocationError
from insitu.run.modules import ModuleTable
from insitu.run.opened import Opened, opened
from insitu.run.source import Stop
from insitu.tree import Listing, Operation, Place, join

_Call = tuple[str, str]
"""A module's path, and the operation in its forward whose function is meant; "" for the forward."""


def unbound(function: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A call with the tensor of a method as its first input."""
    if isinstance(function, (MethodType, BuiltinMethodType)) and isinstance(function.__self__, torch.Tensor):
        return getattr(type(function.__self__), function.__name__), (function.__self__, *args)
    return function, args


class Operations:
    """The operations in the forwards of one model's modules."""

    def __init__(self, modules: ModuleTable, forward_of: Callable[[torch.nn.Module], Callable[..., Any]]) -> None:
        self._modules = modules
        self._forward_of = forward_of
        self._awaited: set[_Call] = set()
        self._wanted: set[_Call] = set()
        self._without_stops: set[_Call] = set()
        self._passed: dict[str, set[tuple[str, str]]] = {}
        self._above: dict[str, frozenset[_Call]] = {}

    # -- what there is --------------------------------------------------------------------

    def listing(self, path: str, op: str = "") -> Listing:
        """The text of the function that ``op`` calls. Raises ``LocationError`` if it can't be had."""
        return self._opened(path, op).text.listing

    def require(self, place: Place) -> list[Operation]:
        """The operation and those around it, outermost first; raises if the forward has none such."""
        found: list[Operation] = []
        for within, name in _steps(place.op):
            listing = self.listing(place.path, within)
            found.append(listing.require(name, Place(place.path, "", within)))
        return found

    def _opened(self, path: str, op: str) -> Opened:
        if not op:
            return opened(self._forward_of(self._modules[path]), f"the forward of `{Place(path, '').call}`")
        within, _, name = op.rpartition(".")
        around = self._opened(path, within)
        around.text.listing.require(name, Place(path, "", within))
        try:
            called = around.callee(name)
        except LookupError:
            raise LocationError(
                f"what `{Place(path, '', op).call}` calls can be told only while it runs; its own input and output "
                f"can be read, but not the operations in it"
            ) from None
        return self._opened_call(called, path, op)

    def _opened_call(self, called: Any, path: str, op: str) -> Opened:
        what = f"`{Place(path, '', op).call}`"
        if isinstance(called, torch.nn.Module):
            paths = [each for each, module in self._modules.by_path.items() if module is called]
            own = f"`{paths[0]}.source`" if paths else "its own node"
            raise LocationError(
                f"{what} calls a module ({type(called).__name__}): the operations in it are those of {own}"
            )
        return opened(called, f"what {what} calls")

    # -- one step -------------------------------------------------------------------------

    def restart(self) -> None:
        self._awaited.clear()
        self._wanted.clear()
        self._without_stops.clear()
        self._passed.clear()

    def await_op(self, place: Place) -> None:
        """From their next call on, the functions around an operation stop at theirs."""
        self._awaited.update((place.path, within) for within, _ in _steps(place.op))
        self._wanted.update((place.path, join(within, name)) for within, name in _steps(place.op))

    def await_any(self, paths: Iterable[str]) -> None:
        """As ``await_op``, for whatever operation of these forwards, or of those above, may be asked for."""
        for path in paths:
            if path not in self._above:
                parts = path.split(".")
                self._above[path] = frozenset((".".join(parts[:depth]), "") for depth in range(len(parts) + 1))
            self._awaited |= self._above[path]

    def is_wanted(self, path: str, op: str) -> bool:
        """Whether a block has asked for a place of the operation, or of one in what it calls."""
        return (path, op) in self._wanted

    def run_unwatched(self, path: str, op: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs an operation that nobody has asked for."""
        passed = self._passed.setdefault(path, set())
        passed.add((op, "input"))
        self._without_stops.add((path, op))
        try:
            return function(*args, **kwargs)
        finally:
            self._without_stops.discard((path, op))
            passed.add((op, "output"))

    def begin(self, path: str, op: str, function: Callable[..., Any], stop: Stop) -> Callable[..., Any]:
        """What to call for ``function``, which is about to be called: with stops if they are awaited.

        Raises ``LocationError`` if they are, and there can be none.
        """
        if not op:
            self._passed[path] = set()
        if (path, op) not in self._awaited:
            self._without_stops.add((path, op))
            return function
        found = self._opened_call(function, path, op) if op else opened(function, f"the forward of `{path}`")
        return found.stopping(partial(stop, path, op))

    def end(self, path: str, op: str) -> None:
        self._without_stops.discard((path, op))

    def passed(self, place: Place) -> None:
        self._passed.setdefault(place.path, set()).add((place.op, place.site))

    def has_passed(self, place: Place) -> bool:
        """Whether the last call of the module came by there."""
        return (place.op, place.site) in self._passed.get(place.path, ())

    def has_gone_by(self, place: Place, found: Iterable[Operation]) -> bool:
        """As ``has_passed``, while the module is under way; in a loop it may come again."""
        return self.has_passed(place) and not any(each.loops for each in found)

    def require_stops(self, place: Place) -> None:
        """Raises if a function around the operation is under way without stops."""
        for within, _ in _steps(place.op):
            if (place.path, within) in self._without_stops:
                around = Place(place.path, "", within).call
                raise LocationError(
                    f"`{place}` can't be served: `{around}` is under way, and began before the block asked for an "
                    f"operation in it. Read the operation before the places inside `{around}`, or name `.source` in "
                    f"the block's own text"
                )


def _steps(op: str) -> list[tuple[str, str]]:
    """Of ``a.b``: ``a`` in the forward itself, and ``b`` in what ``a`` calls."""
    names = op.split(".")
    return [(".".join(names[:depth]), name) for depth, name in enumerate(names)]
