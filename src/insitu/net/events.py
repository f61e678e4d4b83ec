"""What a server answers: events, one frame each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from insitu.net.decoding import Decoder
from insitu.net.errors import WireError
from insitu.net.failures import error_of, failure_of
from insitu.net.frames import Frame
from insitu.net.limits import WireLimits
from insitu.net.sources import local_name
from insitu.net.tensors import Library, TensorReader
from insitu.net.values import Encoder

__all__ = ["Done", "Event", "Failed", "Output", "Progress", "Saves", "decode_event", "encode_event"]


@dataclass(frozen=True)
class Progress:
    """How far a trace is: requests that wait, that run and that have ended, and tokens generated so far."""

    kind: ClassVar[str] = "progress"
    waiting: int = 0
    running: int = 0
    ended: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Output:
    """What an invoke's request has generated so far, where the client asked for a stream."""

    kind: ClassVar[str] = "output"
    invoke: int
    output: Any


@dataclass(frozen=True)
class Saves:
    """What an invoke left: saved values by name, or what its function returned, and lines that saved in vain.

    ``changed``: names of the caller's lists, dicts and sets that the block has changed.
    ``lost``: file, line, holder and deleted name of each, as ``insitu.block.Lost`` has them.
    """

    kind: ClassVar[str] = "saves"
    invoke: int
    values: Mapping[str, Any] = field(default_factory=dict)
    returned: Any = None
    lost: Sequence[tuple[str, int, str | None, str | None]] = ()
    changed: Sequence[str] = ()


@dataclass(frozen=True)
class Failed:
    """An invoke's error, or with no invoke that of the whole trace."""

    kind: ClassVar[str] = "failed"
    error: BaseException
    invoke: int | None = None


@dataclass(frozen=True)
class Done:
    """The last event of a response. One that ends without it was cut off."""

    kind: ClassVar[str] = "done"


Event = Progress | Output | Saves | Failed | Done
_COUNTS = ("waiting", "running", "ended", "tokens")


def encode_event(event: Event, *, everything: bool = False) -> Frame:
    """The message. Raises ``ArgumentError``, naming the variable, for a value that can't travel.

    ``everything``: tracebacks with lines of other files than the client's own.
    """
    encoder = Encoder()
    header: dict[str, Any] = {"kind": event.kind}
    match event:
        case Progress():
            header |= {name: getattr(event, name) for name in _COUNTS}
        case Output(invoke, output):
            header |= {"invoke": invoke, "output": encoder.encode(output, "an output")}
        case Saves(invoke, values, returned, lost, changed):
            header["invoke"] = invoke
            header["values"] = {name: encoder.encode(value, f"`{name}`") for name, value in values.items()}
            header["returned"] = encoder.encode(returned, "what the block returned")
            header["lost"] = [[local_name(file), *rest] for file, *rest in lost]
            header["changed"] = list(changed)
        case Failed(error, invoke):
            header |= {"error": failure_of(error, everything=everything), "invoke": invoke}
    return Frame(header, encoder.tensors.pieces())


def decode_event(frame: Frame, limits: WireLimits | None = None, arrays: Library = "numpy") -> Event:
    """The event that a message is. Raises ``WireError``."""
    header = frame.header
    kind = header.get("kind")
    if kind == "done":
        return Done()
    try:
        decoder = Decoder(TensorReader(frame.whole, limits), limits, _resolve, arrays)
        if kind == "progress":
            return Progress(*(_number(header[name]) for name in _COUNTS))
        if kind == "output":
            return Output(_number(header["invoke"]), decoder.decode(header["output"]))
        if kind == "saves":
            invoke, values = _number(header["invoke"]), decoder.names(header["values"])
            returned, lost = decoder.decode(header["returned"]), _lost(header["lost"])
            changed = header["changed"]
            if not isinstance(changed, list) or not all(isinstance(name, str) for name in changed):
                raise WireError("what was changed is a list of names")
            return Saves(invoke, values, returned, lost, changed)
        if kind == "failed":
            invoke = header["invoke"]
            return Failed(error_of(header["error"]), None if invoke is None else _number(invoke))
    except KeyError as error:
        raise WireError(f"an event of the kind {kind!r:.40} has no {error}") from None
    raise WireError(f"events of the kind {kind!r:.40} are not known", "unknown")


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise WireError("a number of an event is an int from 0 on")
    return value


def _lost(value: Any) -> list[tuple[str, int, str | None, str | None]]:
    def is_line(one: Any) -> bool:
        return (
            isinstance(one, list)
            and len(one) == 4
            and isinstance(one[0], str)
            and type(one[1]) is int
            and all(part is None or isinstance(part, str) for part in one[2:])
        )

    if not isinstance(value, list) or not all(map(is_line, value)):
        raise WireError("what was lost is a list of file, line, holder and name")
    return [(one[0], one[1], one[2], one[3]) for one in value]


def _resolve(ref: Any) -> Any:
    """What a server may send besides values: a dtype or device of torch's, or its name where there is no torch."""
    from insitu.net.refs import Device, Dtype

    if not isinstance(ref, (Dtype, Device)):
        raise WireError("what stands for something of the client's can't be in an answer")
    try:
        import torch
    except ImportError:
        return ref.name
    try:
        made = getattr(torch, ref.name, None) if isinstance(ref, Dtype) else torch.device(ref.name)
    except (RuntimeError, UnicodeError):
        made = None
    if not isinstance(made, (torch.dtype, torch.device)):
        raise WireError(f"{ref.name!r:.40} is no dtype or device")
    return made
