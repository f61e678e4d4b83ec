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
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

_KEPT_FOR = 2.0
"""Seconds. Servers close what is idle: vLLM's after 5."""


class _Idle(NamedTuple):
    connection: HTTPConnection
    since: float
    process: int

    @property
    def is_usable(self) -> bool:
        sock = self.connection.sock
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
        connection, prefix, more = self._connection()
        try:
            connection.request(method, prefix + self._url.path + target, body, {**headers, **more})
            answer = connection.getresponse()
            yield answer
            whole = answer.isclosed()
        except BaseException:
            connection.close()
            raise
        if whole:
            self._idle.append(_Idle(connection, time.monotonic(), os.getpid()))
        else:
            connection.close()

    def _connection(self) -> tuple[HTTPConnection, str, dict[str, str]]:
        """One that can be used, what its targets begin with, and headers of its own."""
        host = self._url.hostname or ""
        found = None if proxy_bypass(host) else getproxies().get(self._url.scheme)
        proxy = None if found is None else urlsplit(found if "//" in found else f"//{found}")
        plain = proxy is not None and self._url.scheme == "http"
        prefix = f"http://{self._url.netloc}" if plain else ""
        authorised = _authorisation(proxy)
        while self._idle:
            idle = self._idle.pop()
            if idle.is_usable:
                return idle.connection, prefix, authorised if plain else {}
            idle.connection.close()
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        at = self._url if proxy is None else proxy
        connection = kind(at.hostname or "", at.port, timeout=self._timeout)
        if proxy is not None and not plain:
            connection.set_tunnel(host, self._url.port, authorised)
        return connection, prefix, authorised if plain else {}


def _close(idle: list[_Idle]) -> None:
    while idle:
        idle.pop().connection.close()


def _authorisation(proxy: SplitResult | None) -> dict[str, str]:
    if proxy is None or proxy.username is None:
        return {}
    given = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
    return {"Proxy-Authorization": f"Basic {base64.b64encode(given).decode()}"}
