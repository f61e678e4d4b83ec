"""Connections to a server that are kept for the next request."""

from __future__ import annotations

import base64
import os
import selectors
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

_SHORT = 1 << 16
"""Bytes, up to which a request is joined."""
_KEPT_FOR = 2.0
"""Seconds. Servers close what is idle: vLLM's after 5."""


class _Whole(HTTPConnection):
    """Sends the headers of a request with its body, so that the server is woken once."""

    _held: list[bytes] | None = None

    def request(self, *args: Any, **more: Any) -> None:
        self._held = held = []
        try:
            super().request(*args, **more)
        finally:
            self._held = None
        if sum(map(len, held)) <= _SHORT:
            held = [b"".join(held)]
        for part in held:
            self.send(part)

    def send(self, data: Any) -> None:
        if self._held is None:
            super().send(data)
        else:
            self._held.append(data)


class _WholeSecure(_Whole, HTTPSConnection):
    pass


class _Open(NamedTuple):
    """A connection, what its targets begin with, and headers of its own."""

    connection: HTTPConnection
    prefix: str
    headers: Mapping[str, str]


class _Idle(NamedTuple):
    open: _Open
    since: float
    process: int

    @property
    def is_usable(self) -> bool:
        sock = self.open.connection.sock
        if sock is None or self.process != os.getpid() or time.monotonic() - self.since > _KEPT_FOR:
            return False
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            return not selector.select(0)  # there is nothing to read but the end


class Connections:
    """Those to one address, for any number of threads. ``timeout``: seconds for an answer to begin and between its
    parts. The proxies of the environment are used."""

    def __init__(self, url: str, timeout: float) -> None:
        self._url = urlsplit(url)
        self._timeout = timeout
        self._idle: list[_Idle] = []
        weakref.finalize(self, _close, self._idle)

    @contextmanager
    def answer(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Iterator[HTTPResponse]:
        """What a request is answered with, whatever its status; its connection is kept if that has been read to the
        end. Raises ``OSError`` and ``HTTPException``."""
        opened = self._kept() or self._made()
        connection = opened.connection
        try:
            connection.request(method, opened.prefix + self._url.path + target, body, {**headers, **opened.headers})
            answer = connection.getresponse()
            yield answer
            whole = answer.isclosed()
        except BaseException:
            connection.close()
            raise
        if whole:
            self._idle.append(_Idle(opened, time.monotonic(), os.getpid()))
        else:
            connection.close()

    def _kept(self) -> _Open | None:
        while self._idle:
            idle = self._idle.pop()
            if idle.is_usable:
                return idle.open
            idle.open.connection.close()
        return None

    def _made(self) -> _Open:
        host = self._url.hostname or ""
        found = None if proxy_bypass(host) else getproxies().get(self._url.scheme)
        proxy = None if found is None else urlsplit(found if "//" in found else f"//{found}")
        plain = proxy is not None and self._url.scheme == "http"
        authorised = _authorisation(proxy)
        kind = _WholeSecure if self._url.scheme == "https" else _Whole
        at = self._url if proxy is None else proxy
        connection = kind(at.hostname or "", at.port, timeout=self._timeout)
        if proxy is not None and not plain:
            connection.set_tunnel(host, self._url.port, authorised)
        return _Open(connection, f"http://{self._url.netloc}" if plain else "", authorised if plain else {})


def _close(idle: list[_Idle]) -> None:
    while idle:
        idle.pop().open.connection.close()


def _authorisation(proxy: SplitResult | None) -> dict[str, str]:
    if proxy is None or proxy.username is None:
        return {}
    given = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
    return {"Proxy-Authorization": f"Basic {base64.b64encode(given).decode()}"}
