"""Who asks: the key of a request, what it may do, and how much at once."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse

from insitu.net import Key, Keys, Permission

_T = TypeVar("_T")


class RefusedError(Exception):
    """An answer with another status than 200."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def response(self) -> JSONResponse:
        return JSONResponse({"error": {"code": self.code, "message": str(self)}}, self.status)


class Access:
    """The keys of a server, and what runs under each. Without keys, everybody who reaches it may do what ``anybody``
    says, and install edits."""

    def __init__(self, keys: Keys, anybody: Permission = Permission.BLOCKS) -> None:
        self._keys = keys
        self._anybody = Key("anybody", b"", anybody, edits=True)
        self._running: Counter[str] = Counter()

    def key(self, request: Request, permission: Permission = Permission.FORM) -> Key:
        """Whose request it is. Raises ``RefusedError`` if it has no key, or one that may not ask for this."""
        if not len(self._keys):
            return self._anybody
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        key = self._keys.find(given) if kind.lower() == "bearer" else None
        if key is None:
            raise RefusedError(401, "no-key", "this server asks for a key: Authorization: Bearer KEY")
        if key.permission < permission:
            raise RefusedError(403, "not-permitted", "this key is for the JSON form alone: POST /insitu/v1/form")
        return key

    def admitted(self, key: Key) -> ExitStack:
        """Counts a trace under a key until this is closed. Raises ``RefusedError`` if as many run as may."""
        if key.limits.traces is not None and self._running[key.name] >= key.limits.traces:
            raise RefusedError(
                429, "too-many", f"{key.limits.traces} traces are in flight under this key, as many as may be"
            )
        self._running[key.name] += 1
        held = ExitStack()
        held.callback(self._running.subtract, [key.name])
        return held


def kept(stream: AsyncGenerator[_T, None], held: ExitStack) -> AsyncGenerator[_T, None]:
    """``stream``; ``held`` is closed at its end, and where nobody ever begins it."""

    async def through() -> AsyncGenerator[_T, None]:
        with held:
            async with aclosing(stream):
                async for each in stream:
                    yield each

    made = through()
    weakref.finalize(made, held.close)
    return made
