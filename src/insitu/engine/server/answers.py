"""The events of a trace as an answer over HTTP: frames, those of short results in one piece."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import ExitStack, aclosing
from typing import Any

from insitu.block import ArgumentError
from insitu.engine.server import metrics
from insitu.net import CONTENT_TYPE, Done, Event, Failed, Output, Progress, Saves, encode_event, frame_parts

_HELD = 1 << 16
_HEADERS = ((b"content-type", CONTENT_TYPE.encode()),)


class Frames:
    """The answer that ``events`` are, an ASGI application. ``held`` is closed before its end is sent.

    Its headers go out while the first event is waited for: the client has read them when that comes. A client that goes
    ends the events.
    """

    def __init__(self, events: AsyncIterator[Event], kind: str, held: ExitStack) -> None:
        self._pieces = _encoded(_counted(events, kind))
        self._held = held

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        sending: Any = asyncio.current_task()
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            gone = True
            sending.cancel()

        watching = asyncio.create_task(watch())
        try:
            with self._held:
                await self._send(send)
        except asyncio.CancelledError:
            if not gone:
                raise
            if sys.version_info >= (3, 11):
                sending.uncancel()
        finally:
            watching.cancel()

    async def _send(self, send: Any) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": list(_HEADERS)}
        beginning = asyncio.create_task(send(start))
        last = b""
        async with aclosing(self._pieces):
            async for body, is_last in self._pieces:
                await beginning
                if is_last:  # sent when the events are over, and what they held is free
                    last = body
                else:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        self._held.close()
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def _counted(events: AsyncIterator[Event], kind: str) -> AsyncGenerator[Event, None]:
    metrics.TRACES.labels(kind).inc()
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            if isinstance(event, Failed):
                metrics.FAILURES.labels(kind).inc()
            elif isinstance(event, Saves):
                metrics.saved([*event.values.values(), event.returned])
            yield event


async def _encoded(events: AsyncGenerator[Event, None]) -> AsyncGenerator[tuple[bytes | memoryview, bool], None]:
    """The parts of the body, and whether each is the last; the frames of short results go out with what comes next."""
    held = bytearray()
    async with aclosing(events):
        async for event in events:
            for part in _parts(event):
                if len(held) + len(part) < _HELD:
                    held += part
                    continue
                if held:
                    yield bytes(held), False
                    held.clear()
                yield part, False
            if held and isinstance(event, (Progress, Output)):
                yield bytes(held), False
                held.clear()
            if isinstance(event, Done):
                yield bytes(held), True


def _parts(event: Event) -> Iterator[bytes | memoryview]:
    try:
        return frame_parts(encode_event(event))
    except ArgumentError as error:
        return frame_parts(encode_event(Failed(error, getattr(event, "invoke", None))))
