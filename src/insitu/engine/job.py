"""A job: one block with the values that it needs, waiting in the engine for its request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from insitu.block import Block, FunctionBlock, Lost, Saves, containers, current_saves

if TYPE_CHECKING:
    from insitu.run import Text

BY_BLOCK = "tracer.stop()"
"""The ``stop_reason`` of a request that its block has ended."""


class Execution(Protocol):
    """One run of a job's block: called once, then asked for what it saved and bound."""

    def __call__(self) -> Any: ...

    def text(self) -> Text:
        """Its code and what the names in it mean, or the function that it is."""
        ...

    def saved(self) -> dict[str, Any]: ...

    def bound(self, names: Iterable[str]) -> dict[str, Any]: ...

    def lost(self, home: Iterable[str]) -> list[Lost]:
        """What it saved that comes home in none of the names ``home``."""
        ...


@dataclass
class Job:
    """A block for one request. ``id`` travels with the request in its sampling parameters."""

    id: str
    block: Block | FunctionBlock
    values: Mapping[str, Any] = field(default_factory=dict)
    module_name: str = "__main__"
    tracer: Any = None
    exports: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    """Names that the block was given and the trace around it has saved."""
    length: int | None = None
    """Steps that the request is certain to have."""
    owner: object = None
    invoke: int = 0
    """Which invoke of its trace it is."""
    keep: bool = False
    """Whether what it saves stays on the device."""
    trace: str = ""
    """Of which trace of the network's it is: what comes from there runs together with others of its trace alone."""
    fresh: bool = False
    """Whether it runs many times, and each run is to have lists, dicts and sets of its own."""

    @property
    def parts(self) -> Mapping[str, Any]:
        """What it takes along of its caller, by name."""
        return {self.block.qualname: self.block.fn} if isinstance(self.block, FunctionBlock) else self.values

    def execution(self) -> Execution:
        if isinstance(self.block, FunctionBlock):
            return _FunctionExecution(self.block, self.tracer)
        if not hasattr(self.block, "namespace"):
            return _CalledExecution(self.block, self.tracer)
        values = containers.copied(self.values) if self.fresh else self.values
        return _BlockExecution(self.block, values, self.module_name)


class _Nameless:
    """A function saves and binds no names: what it returns comes home."""

    def saved(self) -> dict[str, Any]:
        return {}

    def bound(self, names: Iterable[str]) -> dict[str, Any]:
        return {}

    def lost(self, home: Iterable[str]) -> list[Lost]:
        return []


class _CalledExecution(_Nameless):
    """A function from the network (``insitu.guard.GuardedFunction``)."""

    def __init__(self, function: Any, tracer: Any) -> None:
        self._function = function
        self._tracer = tracer

    def __call__(self) -> Any:
        current_saves.set(Saves())
        return self._function(self._tracer)

    def text(self) -> Text:
        return self._function.text()


class _BlockExecution:
    def __init__(self, block: Block, values: Mapping[str, Any], module_name: str) -> None:
        self._block = block
        self._saves = Saves()
        self.namespace = block.namespace(values, self._saves, module_name)

    def __call__(self) -> None:
        current_saves.set(self._saves)
        self._block.execute(self.namespace)

    def text(self) -> Text:
        return self._block.code, self.namespace

    def saved(self) -> dict[str, Any]:
        return self._saves.collect(self.namespace, self._block.binds)

    def bound(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self.namespace[name] for name in names if name in self.namespace}

    def lost(self, home: Iterable[str]) -> list[Lost]:
        return self._block.lost(self._saves, self.namespace, home)


class _FunctionExecution(_Nameless):
    def __init__(self, block: FunctionBlock, tracer: Any) -> None:
        self._block = block
        self._tracer = tracer

    def __call__(self) -> Any:
        current_saves.set(Saves())
        return self._block.run(self._tracer)

    def text(self) -> Text:
        return self._block.fn
