"""One end of the way between a client and its workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from .pickles import dumps, loads
from .segments import Buffers, Sender, machine, opened


class _Message(msgspec.Struct, array_like=True):
    body: bytes
    buffers: Buffers
    sender: str
    received: list[int]


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(_Message)


class Port:
    """Packs what goes out and unpacks what comes in, in turns: the one who has sent waits for the answer.

    Tensors of 64 KiB and more do not travel in the message, if both ends are on one machine; they
    arrive as memory of their own, writable. ``outgoing`` and ``incoming`` are pickle's
    ``persistent_id`` and ``persistent_load``, for objects that mean something on both sides.
    """

    def __init__(self, outgoing: Callable[[Any], Any], incoming: Callable[[Any], Any]) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._sender = Sender()
        self._received: list[int] = []
        self._other = ""

    def pack(self, value: Any) -> bytes:
        """Raises whatever pickle does if something in ``value`` can't travel."""
        body, buffers = dumps(value, self._outgoing)
        received, self._received = self._received, []
        return _encoder.encode(_Message(body, self._sender.lend(buffers, self._other), machine(), received))

    def hindrance(self, value: Any) -> Exception | None:
        """Why ``value`` can't travel."""
        try:
            dumps(value, self._outgoing)
        except Exception as error:
            return error
        return None

    def unpack(self, message: bytes) -> Any:
        got = _decoder.decode(message)
        self._sender.received(got.received)
        self._other = got.sender
        buffers = opened(got.buffers)
        if got.buffers.host:
            self._received.append(got.buffers.number)
        return loads(got.body, buffers, self._incoming)

    @property
    def lent(self) -> int:
        """How many messages' memory the other end has not yet said to have received."""
        return self._sender.lent
