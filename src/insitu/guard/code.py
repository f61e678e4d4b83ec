"""Blocks and functions of a client's, under the guard. The worker runs them as it runs any other."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any

from insitu.block import Lost, Saves, SentOnce, current_saves
from insitu.guard.allowed import Allowed, Namespace
from insitu.guard.builtins import BUILTINS
from insitu.guard.compiled import Compiled, block_of, function_of
from insitu.guard.errors import NotAllowedError
from insitu.guard.limits import GuardLimits
from insitu.guard.rehearsal import Around, RestrictedTogether, rehearsed
from insitu.guard.runtime import Runtime
from insitu.guard.written import Written
from insitu.net.sources import CodeSource, remote_name
from insitu.run.held import NotStraightError, require_known
from insitu.run.noted import Program
from insitu.run.straight import Recording

__all__ = ["GuardedBlock", "GuardedFunction"]

_PYTHONS = frozenset(dir(__builtins__) if not isinstance(__builtins__, dict) else __builtins__)
_SHORT = 4000
"""Characters up to which a worker keeps a block, so that it is sent once."""


class _Restricted:
    """What is asked of a block that may run once for many requests; see ``insitu.guard.written``."""

    limits: GuardLimits
    together = RestrictedTogether

    def knows(self, value: Any) -> bool:
        """Whether the guard has put it in the place of a value of its caller's."""
        return isinstance(value, (Namespace, Allowed))

    def rehearsed(self, program: Program, around: tuple[Any, ...], values: Mapping[int, Any]) -> Mapping[int, int]:
        """As ``insitu.guard.rehearsal.rehearsed``; ``around`` are the fields of its ``Around``."""
        return rehearsed(program, Around(*around), self.limits, values)


class GuardedBlock(_Restricted, SentOnce):
    """A block from the network, with the interface of ``insitu.block.Block``.

    Raises ``NotAllowedError``, with the line, for code that holds what a restricted block can't, and ``WireError``
    for what is no Python. Don't change it. ``compiled``: what has been made of its text elsewhere.
    """

    def __init__(self, source: CodeSource, limits: GuardLimits | None = None, compiled: Compiled | None = None) -> None:
        self.source = source
        self.limits: GuardLimits = limits or GuardLimits()
        self._compiled = compiled = compiled or block_of(source)
        self.filename: str = remote_name(source.filename)
        self.lineno: int = source.first
        self.name: str = source.name
        self.qualname: str = source.qualname
        self.code: CodeType = compiled.code
        self.reads: frozenset[str] = compiled.reads
        self.binds: frozenset[str] = compiled.binds
        self.digest: str = _digest(source, self.limits) if len(source.text) <= _SHORT else ""

    @property
    def tree(self) -> ast.Module:
        """Its statements, as the client wrote them."""
        return self.source.tree()

    def check(self, names: Iterable[str]) -> None:
        """Raises ``NotAllowedError`` for a built-in function that is not in the list and has no value in ``names``."""
        _require_builtins(self.reads - self.binds - set(names))

    def namespace(self, values: Mapping[str, Any], saves: Saves, module_name: str) -> dict[str, Any]:
        """The dict that holds the block's names while it runs."""
        runtime = Runtime(self.limits, saves)
        require_public(values)
        return {**runtime.globals(self.code, values, module_name), "_runtime_": runtime}

    def written(
        self, values: Mapping[str, Any], saves: Saves, show: Callable[[Any], Any], recording: Recording
    ) -> dict[str, Any]:
        """As ``namespace``, for a time that the block is written down."""
        require_known(self.code)
        runtime = Written(self.limits, saves, show, recording)
        return {**runtime.globals(self.code, values), "_runtime_": runtime}

    def execute(self, namespace: dict[str, Any]) -> None:
        """Run in a dict made by ``namespace``. What the block raises is raised, and ``LimitError``."""
        runtime: Runtime = namespace["_runtime_"]
        saves: Saves = namespace["_runtime_"]._saves
        self.check(namespace)
        token = current_saves.set(saves)
        try:
            with runtime.active():
                exec(self.code, namespace)
            runtime.require_savable(saves.collect(namespace, self.binds).values())
        finally:
            current_saves.reset(token)

    def run(self, values: Mapping[str, Any], saves: Saves, module_name: str) -> dict[str, Any]:
        """Run with these values for the names it reads; returns all names it has at the end."""
        namespace = self.namespace(values, saves, module_name)
        self.execute(namespace)
        return namespace

    def lost(self, saves: Saves, namespace: Mapping[str, Any], home: Iterable[str]) -> list[Lost]:
        """What a run of it saved and what comes home under none of the names ``home``."""
        within = self._compiled.saved_within
        found = saves.lost(namespace, home)
        return [
            each
            for each in found
            if each.holder or each.deleted or each.filename != self.filename or each.lineno not in within
        ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GuardedBlock) and (self.source, self.limits) == (other.source, other.limits)

    def __hash__(self) -> int:
        return hash(self.source)

    def __reduce__(self) -> Any:
        return GuardedBlock, (self.source, self.limits, self._compiled)


class GuardedFunction(_Restricted):
    """A function of a client's: called by a restricted block, or as the function form's block.

    ``names``, ``defaults`` and ``kwdefaults`` are what it uses and has; they may be set after it was made, as functions
    may use each other.
    """

    def __init__(self, source: CodeSource, limits: GuardLimits | None = None) -> None:
        self.source = source
        self.limits: GuardLimits = limits or GuardLimits()
        self.names: dict[str, Any] = {}
        self.defaults: tuple[Any, ...] = ()
        self.kwdefaults: dict[str, Any] = {}
        self.__qualname__ = source.qualname
        self._compiled = function_of(source)

    def check(self) -> None:
        """As ``GuardedBlock.check``."""
        compiled = self._compiled
        _require_builtins(compiled.reads - {compiled.name} - set(self.names))

    def guarded(self) -> tuple[CodeType, dict[str, Any], str]:
        """Code that defines the function, the values of names in it, and the name that it has there."""
        compiled = self._compiled
        require_public(self.names)
        return compiled.code, self.names, compiled.name

    def text(self) -> tuple[CodeType, Mapping[str, Any]]:
        """Its code, and what names in it mean."""
        return self._compiled.code, self.names

    def __call__(self, tracer: Any) -> Any:
        """Runs it as a block: what it returns comes home."""
        self.check()
        return self._run(Runtime(self.limits), tracer)

    def _run(self, runtime: Runtime, tracer: Any) -> Any:
        with runtime.active():
            returned = runtime.instance(self)(tracer)
        runtime.require_savable([returned])
        return returned

    def written(self, tracer: Any, show: Callable[[Any], Any], recording: Recording) -> Any:
        """What it returns when it is written down."""
        require_known(self._compiled.code)
        if self.defaults or self.kwdefaults:
            raise NotStraightError
        return self._run(Written(self.limits, None, show, recording), tracer)

    @property
    def __code__(self) -> CodeType:
        return self._compiled.code


@functools.lru_cache(maxsize=512)
def _digest(source: CodeSource, limits: GuardLimits) -> str:
    return hashlib.sha256(repr((source, limits)).encode()).hexdigest()


def require_public(names: Iterable[str]) -> None:
    """Refuses values for names that the guard's own functions may have."""
    for name in names:
        if name.startswith("_") and name != "_":
            raise NotAllowedError(f"`{name:.60}`: no name of a restricted block may begin with an underscore")


def _require_builtins(names: Iterable[str]) -> None:
    for name in sorted(names):
        if name in _PYTHONS and name not in BUILTINS:
            raise NotAllowedError(f"`{name}` is not in the list of what a restricted block may use")
