"""An edit: the ``with`` statement whose body stays on the engine, and the handle to it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from insitu.block import ArgumentError, AsyncCapturedBody, CapturedBody, Lost, Site, UnsavedWarning
from insitu.engine.client.same_rows import does_same_to_rows, with_own_tensors
from insitu.engine.client.tracer import Tracer
from insitu.engine.job import Job
from insitu.tree import current

if TYPE_CHECKING:
    from insitu.engine.client.engine import Engine


class EditTracer(Tracer):
    """The ``tracer`` of an installed edit."""

    runs_edits = True

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def invoke(self, prompt: Any, **sampling: Any) -> NoReturn:
        raise ArgumentError("`tracer.invoke` is not for edits, which run beside whatever requests come")


class Edit:
    """An edit that is, or was, installed on an engine. ``number`` counts them in the order of their installation."""

    def __init__(self, engine: Engine, name: str | None) -> None:
        if not (name is None or (isinstance(name, str) and name)):
            raise ArgumentError(f"the name of an edit is a text; got {name!r:.60}")
        self._engine = engine
        self.name = name
        self.number = 0
        self.tenant = ""
        """At a server, beside whose requests alone it runs; empty: beside everybody's."""
        self.same_for_rows: bool = False
        """Whether it does the same to every row of every step, so that it need not see a prompt whole."""
        self._line = ("", 0)
        self._told: set[Any] = set()

    def job(self, site: Site) -> Job:
        """Its block, with what it reads of its caller as that is now."""
        block, scope = site.block, site.scope
        self._line = (block.filename, block.lineno)
        values = scope.copied(scope.values(block.reads))
        self.same_for_rows = does_same_to_rows(block, values)
        values = with_own_tensors(values)
        return Job("", block, values, scope.module_name, fresh=True)

    @property
    def installed(self) -> bool:
        """Whether requests that come from now on run under it."""
        return any(edit is self for edit in self._engine.installed)

    def clear(self) -> None:
        """Takes it off the engine. Requests that came before keep it to their end; a second time does nothing."""
        refuse_in_block("an edit", "cleared")
        self._engine.clear([self])

    def warn_of(self, lost: Iterable[Lost]) -> None:
        """Says of each line once that it saved in vain."""
        for one in lost:
            if one not in self._told:
                self._told.add(one)
                warnings.warn_explicit(one.message, UnsavedWarning, one.filename, one.lineno)

    def warn_of_hidden(self, names: Iterable[str]) -> None:
        """Says once that other edits saved under ``names`` too, and are not seen."""
        for name in names:
            if name not in self._told:
                self._told.add(name)
                said = f"`{name}` is saved by several edits beside one request, and the output has that of {self} alone"
                warnings.warn_explicit(f"{said}: give each a name of its own", UnsavedWarning, *self._line)

    def __repr__(self) -> str:
        name = "" if self.name is None else f" {self.name!r}"
        return f"<edit {self.number}{name}{'' if self.installed else ', not installed'}>"


class AsyncEdit(Edit):
    """One on an async engine, which is awaited."""

    async def aclear(self) -> None:
        """Takes it off the engine. Requests that came before keep it to their end; a second time does nothing."""
        refuse_in_block("an edit", "cleared")
        engine: Any = self._engine
        await engine.clear([self])

    def clear(self) -> NoReturn:
        raise ArgumentError("this edit is on an async engine: write `await edit.aclear()`")


class _Statement:
    kind: type[Edit] = Edit

    def __init__(self, engine: Any, name: str | None) -> None:
        refuse_in_block("an edit", "installed")
        self._engine = engine
        self._edit = self.kind(engine, name)
        self._tracer = EditTracer(engine)

    def target(self) -> tuple[EditTracer, Edit]:
        refuse_in_block("an edit", "installed")
        if self._edit.number:
            raise ArgumentError("this edit was entered before: call `model.edit()` again for another")
        return self._tracer, self._edit


class EditStatement(_Statement, CapturedBody):
    """``with model.edit(name) as (tracer, edit):``"""

    def run_block(self, site: Site) -> BaseException | None:
        self._engine.install(self._edit, self._edit.job(site))
        return None


class AsyncEditStatement(_Statement, AsyncCapturedBody):
    """``async with model.edit(name) as (tracer, edit):``"""

    kind: type[Edit] = AsyncEdit

    def __enter__(self) -> NoReturn:
        raise ArgumentError("this engine is async: write `async with model.edit() as (tracer, edit):`")

    def __exit__(self, *_: Any) -> None:  # Python asks for both before it calls the one
        ...

    async def run_block_async(self, site: Site) -> BaseException | None:
        await self._engine.install(self._edit, self._edit.job(site))
        return None


def refuse_in_block(what: str, done: str) -> None:
    if current.get() is not None:
        raise ArgumentError(f"{what} can't be {done} inside a block: do it before the `with`, or after")
