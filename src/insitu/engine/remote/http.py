"""Requests to a server: with a key, time limits, and errors that say what to do."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any

from insitu.block import ArgumentError, EngineError
from insitu.net import CONTENT_TYPE, Frame, FrameReader

_PREFIX = "/insitu/v1"
_TRIES, _PAUSE = 3, 0.2


class Http:
    """One server. ``timeout`` is in seconds, for one answer to begin and between its parts."""

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        if not str(url).startswith(("http://", "https://")):
            raise ArgumentError(f"the address of a server begins with http:// or https://; got {url!r:.60}")
        self.url = url.rstrip("/")
        self._timeout = timeout
        key = os.environ.get("INSITU_API_KEY") if api_key is None else api_key
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def get(self, route: str) -> Any:
        """The JSON at a route. Tried again if the server can't be reached, since nothing is changed by it."""
        for attempt in range(_TRIES):
            try:
                with self._opened(urllib.request.Request(self._at(route), headers=self._headers)) as answer:
                    return json.load(answer)
            except (ConnectionError, TimeoutError, HTTPException) as error:
                if attempt == _TRIES - 1:
                    raise self._unreachable(error) from None
                time.sleep(_PAUSE * 2**attempt)
        raise AssertionError

    def post(self, route: str, body: bytes) -> Iterator[Frame]:
        """The frames of the answer as they come. Sent once: it can't be known how far a trace came."""
        headers = {**self._headers, "Content-Type": CONTENT_TYPE}
        reader = FrameReader()
        try:
            with self._opened(urllib.request.Request(self._at(route), body, headers)) as answer:
                while part := answer.read1(1 << 20):
                    yield from reader.feed(part)
        except (ConnectionError, TimeoutError, HTTPException) as error:
            raise self._unreachable(error) from None
        reader.close()

    def _at(self, route: str) -> str:
        return f"{self.url}{_PREFIX}/{route}"

    def _opened(self, request: urllib.request.Request) -> Any:
        try:
            return urllib.request.urlopen(request, timeout=self._timeout)
        except urllib.error.HTTPError as error:
            with error:
                raise EngineError(f"the server {self.url} answered {error.code}: {_said(error.read(10_000))}") from None
        except urllib.error.URLError as error:
            raise ConnectionError(str(error.reason)) from None

    def _unreachable(self, error: Exception) -> EngineError:
        return EngineError(f"the server {self.url} can't be reached, or has gone away: {error}")


def _said(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
