"""The events of a trace as an answer over HTTP: frames, those of short results in one piece."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing
from typing import Any, NamedTuple

from fastapi.responses import Response, StreamingResponse

from insitu.block import ArgumentError
from insitu.engine.server import metrics
from insitu.engine.server.access import kept
from insitu.net import CONTENT_TYPE, Done, Event, Failed, Output, Progress, Saves, encode_event, frame_parts

_HELD = 1 << 16


class Piece(NamedTuple):
    """A part of the body."""

    body: bytes | memoryview
    is_last: bool = False


def answered(events: AsyncIterator[Event], kind: str, held: ExitStack) -> Response:
    """The answer that these events are. ``held`` is closed before its end is sent, and where nobody ever begins it."""
    pieces: Any = kept(_encoded(_counted(events, kind)), held)
    return Frames(pieces, media_type=CONTENT_TYPE)


class Frames(StreamingResponse):
    """A body of ``Piece``. Where the first is the last, it goes out with its length, not as a stream."""

    async def stream_response(self, send: Any) -> None:
        last, begun = b"", False
        pieces: Any = self.body_iterator
        async for body, is_last in pieces:
            if is_last:  # sent when the events are over, and what they held is free
                last = body
                continue
            if not begun:
                begun = True
                await self._begin(send, [])
            await send({"type": "http.response.body", "body": body, "more_body": True})
        if not begun:
            await self._begin(send, [(b"content-length", b"%d" % len(last))])
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _begin(self, send: Any, more: list[tuple[bytes, bytes]]) -> None:
        headers = [*self.raw_headers, *more]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})


async def _counted(events: AsyncIterator[Event], kind: str) -> AsyncIterator[Event]:
    metrics.TRACES.labels(kind).inc()
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            if isinstance(event, Failed):
                metrics.FAILURES.labels(kind).inc()
            elif isinstance(event, Saves):
                metrics.saved([*event.values.values(), event.returned])
            yield event


async def _encoded(events: AsyncIterator[Event]) -> AsyncGenerator[Piece, None]:
    """The frames; those of short results go out with what comes next."""
    held = bytearray()
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            try:
                parts = frame_parts(encode_event(event))
            except ArgumentError as error:
                parts = frame_parts(encode_event(Failed(error, getattr(event, "invoke", None))))
            for part in parts:
                if len(held) + len(part) < _HELD:
                    held += part
                    continue
                if held:
                    yield Piece(bytes(held))
                    held.clear()
                yield Piece(part)
            if held and isinstance(event, (Progress, Output)):
                yield Piece(bytes(held))
                held.clear()
            if isinstance(event, Done):
                yield Piece(bytes(held), is_last=True)
