"""Requests to a server: with a key, time limits, and errors that say what to do."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlencode

from insitu.block import ArgumentError, EngineError, InsituError, errors
from insitu.engine.remote.connections import Connections
from insitu.net import CONTENT_TYPE, Frame, FrameReader

_PREFIX = "/insitu/v1"
_TRIES, _PAUSE = 3, 0.2


class Http:
    """One server. ``timeout`` is in seconds, for one answer to begin and between its parts."""

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        if not str(url).startswith(("http://", "https://")):
            raise ArgumentError(f"the address of a server begins with http:// or https://; got {url!r:.60}")
        self.url: str = url.rstrip("/")
        self._connections = Connections(self.url, timeout)
        key = os.environ.get("INSITU_API_KEY") if api_key is None else api_key
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def get(self, route: str, **query: str) -> Any:
        """The JSON at a route. Tried again if the server can't be reached, since nothing is changed by it."""
        for attempt in range(_TRIES - 1):
            try:
                return self._json("GET", route, query=query)
            except InsituError:
                raise
            except (OSError, HTTPException):
                time.sleep(_PAUSE * 2**attempt)
        with self._reaching():
            return self._json("GET", route, query=query)

    def send(
        self, method: str, route: str, body: bytes | None = None, kind: str = "application/json", **query: str
    ) -> Any:
        """The JSON that something is answered with. Sent once."""
        with self._reaching():
            return self._json(method, route, body, kind, query)

    def _json(
        self,
        method: str,
        route: str,
        body: bytes | None = None,
        kind: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> Any:
        with self._answered(method, route + (f"?{urlencode(query)}" if query else ""), body, kind) as answer:
            return json.load(answer)

    def post(self, route: str, body: bytes) -> Iterator[Frame]:
        """The frames of the answer as they come. Sent once: it can't be known how far a trace came."""
        reader = FrameReader()
        with self._reaching(), self._answered("POST", route, body, CONTENT_TYPE) as answer:
            # What has a length comes at once, and of that read1 does not notice the end.
            read = answer.read1 if answer.length is None else answer.read
            while part := read(1 << 20):
                yield from reader.feed(part)
        reader.close()

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except InsituError:  # what a server answers may be an OSError too: a PermissionError
            raise
        except (OSError, HTTPException) as error:
            raise EngineError(f"the server {self.url} can't be reached, or has gone away: {error}") from None

    @contextmanager
    def _answered(self, method: str, route: str, body: bytes | None, kind: str) -> Iterator[HTTPResponse]:
        headers = {**self._headers, "Content-Type": kind}
        with self._connections.answer(method, f"{_PREFIX}/{route}", body, headers) as answer:
            if answer.status >= 300:
                raise self._refused(answer.status, answer.read(10_000))
            yield answer

    def _refused(self, status: int, body: bytes) -> InsituError:
        """Of the class that the server names."""
        kind = getattr(errors, str(_found(body, "code")), None)
        if isinstance(kind, type) and issubclass(kind, InsituError):
            return kind(_said(body))
        way_out = ""
        if status == 401:
            given = "Authorization" in self._headers
            way_out = (
                "; the key that was given is none of its own"
                if given
                else "; give it to `insitu.connect(url, api_key=KEY)`, or set INSITU_API_KEY"
            )
        return EngineError(f"the server {self.url} answered {status}: {_said(body)}{way_out}")


def _said(body: bytes) -> str:
    return _found(body, "message") or body.decode(errors="replace")[:500]


def _found(body: bytes, name: str) -> str | None:
    try:
        return str(json.loads(body)["error"][name])
    except (ValueError, KeyError, TypeError):
        return None
