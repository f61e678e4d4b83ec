"""The calls of a forward in which somebody may wait: what comes before each and after it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from insitu.block import LocationError
from insitu.run.alone import Alone
from insitu.run.calls import Calls
from insitu.run.modules import ModuleTable
from insitu.run.ops import Operations, unbound
from insitu.run.order import VisitOrder
from insitu.run.recorder import Recorder
from insitu.run.skips import KeptRows
from insitu.run.watches import Watches
from insitu.tree import Place


class Watching(Alone):
    """Watches the modules of a model, and their operations, and says where the forward is."""

    def __init__(self, root: torch.nn.Module, unembed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.modules: ModuleTable = ModuleTable(root)
        self.order: VisitOrder = VisitOrder()
        self.calls: Calls = Calls(self.modules, unembed)
        self._watches = Watches(self._visit)
        self.ops: Operations = Operations(self.modules, self._watches.forward_of)
        self._reached = 0
        self._sourced: set[Place] = set()  # where one has waited whose block names operations
        self._active: list[str] = []
        self._called: set[int] = set()
        self._watched: set[Place] = set()
        self._surroundings: dict[Place, list[str]] = {}
        self._ends: dict[tuple[str, str], tuple[Place, Place]] = {}

    @abstractmethod
    def _serve_if_awaited(self, place: Place, live: Any) -> Any:
        """Serves ``live`` to those who wait at ``place``; returns what the forward goes on with."""

    @abstractmethod
    def _kept_for_skips(self, leave: Place, inputs: Any) -> KeptRows | None:
        """What is to be put back after the call that ends with ``leave``, which some requests skip."""

    @abstractmethod
    def _refuse_inside(self, call: Place, error: LocationError) -> None:
        """Ends the wait of runs for operations in a function that can't stop at them."""

    @contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """What runs here belongs to the module at ``path``, though that itself is not called."""
        self._active.append(path)
        try:
            yield
        finally:
            self._active.pop()

    def _watch(self, place: Place) -> None:
        if not place.in_forward:
            return
        if place not in self._watched:
            self._watched.add(place)
            for path in self._around(place):
                self._wrap(path)
            if place.op:
                self.ops.await_op(place)
        if place in self._sourced:
            self.ops.await_any(self._around(place))

    def _around(self, place: Place) -> list[str]:
        """Paths of the modules to watch for ``place``: its own, and those in whose calls it comes."""
        known = self._surroundings.get(place)
        if known is None:
            paths = (*self.order.calls(place.module), *self.modules.owners(place.path), place.path)
            known = list(dict.fromkeys(paths))
            if self.order.complete:
                self._surroundings[place] = known
        return known

    def _watch_for(self, recorder: Recorder) -> None:
        for path in recorder.paths:
            self._wrap(path)

    def _wrap(self, path: str) -> None:
        self._watches.put_on(self.modules[path])

    def _visit(self, module: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._called.add(id(module))
        path = None if self.calls.running else self.modules.path_now(module, self._active)
        if path is None:
            return forward(*args, **kwargs)
        self._active.append(path)
        try:
            return self._pass(path, "", forward, args, kwargs)
        finally:
            self._active.pop()

    def _operate(self, path: str, within: str, name: str, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """An operation in a forward with stops."""
        if self.calls.running:
            return function(*args, **kwargs)
        function, args = unbound(function, args)
        op = f"{within}.{name}" if within else name
        if self.ops.is_wanted(path, op):
            return self._pass(path, op, function, args, kwargs)
        value = self.ops.run_unwatched(path, op, function, args, kwargs)
        self._note_module(function)
        # A module that it calls may have been where a block came to ask for its output.
        return self._serve_if_awaited(Place(path, "output", op), value) if self.ops.is_wanted(path, op) else value

    def _pass(self, path: str, op: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call in the forward, with what happens before and after it."""
        ends = self._ends.get((path, op))
        if ends is None:
            ends = self._ends[path, op] = Place(path, "input", op), Place(path, "output", op)
        entry, leave = ends
        args, kwargs = self._serve_if_awaited(entry, (args, kwargs))
        kept = self._kept_for_skips(leave, (args, kwargs))
        try:
            value = self._beginning(leave, function)(*args, **kwargs)
        finally:
            self.ops.end(path, op)
        if op:
            self._note_module(function)
        if kept is not None:
            kept.put_back()
        return self._serve_if_awaited(leave, value)

    def _note_module(self, called: Any) -> None:
        """What an operation called, once it is over: if it is a module, its places have gone by."""
        if isinstance(called, torch.nn.Module):
            path = self.modules.path_now(called, self._active)
            self._note_left(Place(path or "", "output"))

    def _note_left(self, output: Place) -> None:
        self._reached = max(self._reached, self.order.position(output))

    def _beginning(self, leave: Place, function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return self.ops.begin(leave.path, leave.op, function, self._operate)
        except LocationError as error:
            self._refuse_inside(leave, error)
            return function
