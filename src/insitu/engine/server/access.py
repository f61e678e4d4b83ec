"""Who asks: the key of a request, what it may do, and how much at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Request
from fastapi.responses import JSONResponse

from insitu.net import Key, Keys, Permission


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

    def require_room(self, key: Key) -> None:
        """Raises ``RefusedError`` if as many traces run under a key as may."""
        if key.limits.traces is not None and self._running[key.name] >= key.limits.traces:
            raise RefusedError(
                429, "too-many", f"{key.limits.traces} traces are in flight under this key, as many as may be"
            )

    @contextmanager
    def running(self, key: Key) -> Iterator[None]:
        self._running[key.name] += 1
        try:
            yield
        finally:
            self._running[key.name] -= 1
