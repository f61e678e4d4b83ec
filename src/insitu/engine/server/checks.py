"""Checks of a server's model, asked for by its operators."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec

from insitu.block import InsituError
from insitu.engine.client.async_model import AsyncVLLM
from insitu.engine.server.access import RefusedError
from insitu.net import Key


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    prompts: list[str | list[int]] | None = None
    reference: bool = True


class Checks:
    """One at a time: each loads a second copy of the model, unless it is to do without."""

    def __init__(self, model: AsyncVLLM) -> None:
        self._model = model
        self._turn = asyncio.Lock()

    async def run(self, key: Key, body: bytes) -> dict[str, Any]:
        """The report as JSON. Raises ``RefusedError``."""
        if not key.edits:
            raise RefusedError(403, "not-permitted", "a check is for keys that may install edits for everybody")
        try:
            asked = msgspec.json.decode(body or b"{}", type=_Asked)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RefusedError(400, "invalid", str(error)) from None
        if self._model._running().installed.chosen(None):
            raise RefusedError(409, "ArgumentError", "the model is checked as it is: clear its edits first")
        if self._turn.locked():
            raise RefusedError(429, "too-many", "another check runs")
        async with self._turn:
            try:
                report = await self._model.check(asked.prompts, reference=asked.reference, show=False)
            except (InsituError, ValueError, TypeError) as error:
                raise RefusedError(400, type(error).__name__, str(error)) from None
        return dataclasses.asdict(report)
