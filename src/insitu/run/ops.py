"""Which forwards stop at their operations in this step, and which operations have gone by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch

from insitu.block import LocationError
from insitu.run.modules import ModuleTable
from insitu.run.source import Rewritten, rewritten
from insitu.tree import Listing, Operation, Place

Stop = Callable[..., Any]
_Call = tuple[str, str]
"""A module's path, and the operation in its forward whose function is meant; "" for the forward."""


class Operations:
    """The operations in the forwards of one model's modules."""

    def __init__(self, modules: ModuleTable, forward_of: Callable[[torch.nn.Module], Callable[..., Any]]) -> None:
        self._modules = modules
        self._forward_of = forward_of
        self._awaited: set[_Call] = set()
        self._without_stops: set[_Call] = set()
        self._passed: dict[str, set[Place]] = {}

    # -- what there is --------------------------------------------------------------------

    def listing(self, path: str, op: str = "") -> Listing:
        """The text of the function that ``op`` calls. Raises ``LocationError`` if it can't be had."""
        return self._text(path, op)[0].listing

    def require(self, place: Place) -> list[Operation]:
        """The operation and those around it, outermost first; raises if the forward has none such."""
        found: list[Operation] = []
        for within, name in _steps(place.op):
            listing = self.listing(place.path, within)
            found.append(listing.require(name, f"{Place(place.path, '', within).call}.source"))
        return found

    def _text(self, path: str, op: str) -> tuple[Rewritten, FunctionType, Any]:
        """The text of a function, the function, and the object that it is a method of."""
        if not op:
            return _opened(self._forward_of(self._modules[path]), f"the forward of `{path}`")
        within, _, name = op.rpartition(".")
        text, function, owner = self._text(path, within)
        text.listing.require(name, f"{Place(path, '', within).call}.source")
        what = f"`{Place(path, '', op).call}`"
        try:
            called = text.callee(name, function, owner)
        except LookupError:
            raise LocationError(
                f"what {what} calls can be told only while it runs; its own input and output can be read, but not "
                f"the operations in it"
            ) from None
        return self._opened_op(called, what)

    def _opened_op(self, called: Any, what: str) -> tuple[Rewritten, FunctionType, Any]:
        if isinstance(called, torch.nn.Module):
            paths = [path for path, module in self._modules.by_path.items() if module is called]
            own = f"`{paths[0]}.source`" if paths else "its own node"
            raise LocationError(
                f"{what} calls a module ({type(called).__name__}): the operations in it are those of {own}"
            )
        return _opened(called, f"what {what} calls")

    # -- one step -------------------------------------------------------------------------

    def restart(self) -> None:
        self._awaited.clear()
        self._without_stops.clear()
        self._passed.clear()

    def await_op(self, place: Place) -> None:
        """From their next call on, the functions around an operation stop at theirs."""
        self._awaited.update((place.path, within) for within, _ in _steps(place.op))

    def await_any(self, paths: Iterable[str]) -> None:
        """As ``await_op``, for whatever operation of these forwards, or of those above, may be asked for."""
        for path in paths:
            parts = path.split(".")
            self._awaited.update((".".join(parts[:depth]), "") for depth in range(len(parts) + 1))

    def begin(self, path: str, op: str, function: Callable[..., Any], stop: Stop) -> Callable[..., Any]:
        """What to call for ``function``, which is about to be called: with stops if they are awaited.

        Raises ``LocationError`` if they are, and there can be none.
        """
        if not op:
            self._passed[path] = set()
        if (path, op) not in self._awaited:
            self._without_stops.add((path, op))
            return function
        what = f"`{Place(path, '', op).call}`"
        text, plain, owner = self._opened_op(function, what) if op else _opened(function, f"the forward of {what}")
        made = text.bound(plain, partial(stop, path, op))
        return made if owner is None else MethodType(made, owner)

    def end(self, path: str, op: str) -> None:
        self._without_stops.discard((path, op))

    def passed(self, place: Place) -> None:
        self._passed.setdefault(place.path, set()).add(place)

    def has_passed(self, place: Place) -> bool:
        """Whether the last call of the module came by there."""
        return place in self._passed.get(place.path, ())

    def missed(self, place: Place) -> str | None:
        """The function around an operation that is under way without stops, if there is one."""
        for within, _ in _steps(place.op):
            if (place.path, within) in self._without_stops:
                return Place(place.path, "", within).call
        return None


def _steps(op: str) -> list[tuple[str, str]]:
    """Of ``a.b``: ``a`` in the forward itself, and ``b`` in what ``a`` calls."""
    names = op.split(".")
    return [(".".join(names[:depth]), name) for depth, name in enumerate(names)]


def _opened(called: Any, what: str) -> tuple[Rewritten, FunctionType, Any]:
    owner = None
    if isinstance(called, MethodType):
        called, owner = called.__func__, called.__self__
    elif not isinstance(called, FunctionType):
        called, owner = vars(type(called)).get("__call__"), called
    if not isinstance(called, FunctionType):
        kind = getattr(owner, "__qualname__", type(owner).__name__)
        raise LocationError(f"{what} is not written in Python ({kind}): no operations in it can be named")
    return rewritten(called), called, owner
