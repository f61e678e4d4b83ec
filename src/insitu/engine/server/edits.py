"""The edits of a server: who installed them, beside whose requests they run, and who may take them off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from insitu.block import Block, FunctionBlock, InsituError
from insitu.engine.client.async_model import AsyncVLLM
from insitu.engine.client.edit import AsyncEdit, EditTracer
from insitu.engine.client.same_rows import does_same_to_rows
from insitu.engine.job import Job
from insitu.engine.server.access import RefusedError
from insitu.engine.server.traces import Traces
from insitu.guard import GuardedBlock, GuardLimits
from insitu.net import Key, TraceRequest, WireError
from insitu.net.errors import FormError
from insitu.net.form import parsed
from insitu.net.form_block import form_block
from insitu.net.frames import decode_json

_MOST = 64
_NAME = 100


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    """An edit that is a form."""

    form: dict[str, Any]
    name: str | None = None


class Edits:
    """Those of a key that may install for everybody run beside every request of the server, those of another
    key beside that key's own, and are seen by nobody else."""

    def __init__(self, model: AsyncVLLM, traces: Traces) -> None:
        self._model = model
        self._traces = traces
        self._installers: dict[int, str] = {}
        self._installing: Counter[str] = Counter()

    async def install(self, key: Key, name: str | None, asked: TraceRequest) -> dict[str, Any]:
        """The block of a request, whose prompt is left out. Raises ``RefusedError``."""
        tracer = EditTracer(self._model._running())
        try:
            if len(asked.invokes) != 1:
                raise WireError("an edit is one block")
            (one,) = await self._traces.blocks(asked, key, tracer)
            if not isinstance(one.block, (Block, GuardedBlock)):
                raise WireError("an edit is a block, not a function")
        except (InsituError, WireError, ValueError, TypeError) as error:
            raise _refused(error) from None
        block: Any = one.block
        return await self._installed(
            key, name, Job("", block, one.values, "<client>", fresh=True), does_same_to_rows(block, one.values)
        )

    async def install_form(self, key: Key, body: bytes) -> dict[str, Any]:
        """A form, from the JSON of a request. Raises ``RefusedError``."""
        try:
            asked = msgspec.convert(decode_json(body), _Asked)
            limits = GuardLimits().of_key(key.limits)
            block = form_block(parsed(asked.form), self._model, limits.saved_bytes)
        except (InsituError, msgspec.ValidationError) as error:
            raise _refused(error) from None
        job = Job("", FunctionBlock(block), tracer=EditTracer(self._model._running()))
        return await self._installed(key, asked.name, job, block.same_for_rows)

    async def _installed(self, key: Key, name: str | None, job: Job, same_for_rows: bool) -> dict[str, Any]:
        engine: Any = self._model._running()
        installed = sum(self._installers.get(edit.number) == key.name for edit in engine.installed)
        if installed + self._installing[key.name] >= _MOST:
            raise RefusedError(429, "too-many", f"{_MOST} edits are installed under this key, as many as may be")
        if name is not None and not (len(name) <= _NAME and name.isprintable()):
            raise RefusedError(400, "ArgumentError", f"the name of an edit has at most {_NAME} printable characters")
        self._installing[key.name] += 1
        try:
            edit = AsyncEdit(engine, name)
            edit.tenant, edit.same_for_rows = "" if key.edits else key.name, same_for_rows
            await engine.install(edit, job)
        except (InsituError, ValueError, TypeError) as error:
            raise _refused(error) from None
        finally:
            self._installing[key.name] -= 1
        self._installers[edit.number] = key.name
        return self._described(key, edit)

    def seen(self, key: Key) -> list[dict[str, Any]]:
        """Those that run beside the key's requests, in their order."""
        return [self._described(key, edit) for edit in self._model._running().installed.chosen(None, key.name)]

    async def clear(self, key: Key, number: int | None = None) -> list[int]:
        """Takes one off, or all that the key may. Raises ``RefusedError`` for one that it may not, or that is none."""
        edits = [edit for edit in self._removable(key) if number in (None, edit.number)]
        if number is not None and not edits:
            raise RefusedError(404, "no-edit", f"there is no edit {number} that this key may clear")
        await self._model._running().clear(edits)
        for edit in edits:
            self._installers.pop(edit.number, None)
        return [edit.number for edit in edits]

    def _removable(self, key: Key) -> Iterator[Any]:
        for edit in self._model._running().installed:
            if self._installers.get(edit.number) == key.name or (key.edits and not edit.tenant):
                yield edit

    def _described(self, key: Key, edit: Any) -> dict[str, Any]:
        return {
            "number": edit.number,
            "name": edit.name,
            "everybody": not edit.tenant,
            "own": self._installers.get(edit.number) == key.name,
            "same_for_rows": edit.same_for_rows,
        }


def _refused(error: Exception) -> RefusedError:
    code = getattr(error, "code", None)
    said = f"form: {error}" if isinstance(error, FormError) else str(error)
    return RefusedError(400, code if isinstance(code, str) else type(error).__name__, said)
