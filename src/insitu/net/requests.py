"""What a client asks a server for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from insitu.net.decoding import Decoder
from insitu.net.errors import WireError
from insitu.net.frames import Buffer, Frame
from insitu.net.limits import WireLimits
from insitu.net.refs import Ref
from insitu.net.sources import LONGEST, CodeSource
from insitu.net.tensors import Library, TensorReader

__all__ = ["DecodedFunction", "DecodedInvoke", "DecodedTrace", "FunctionSource", "InvokeRequest", "TraceRequest"]

VERSION = 1
_KINDS = ("trace", "edit", "generate")
_INVOKES = 1024


@dataclass(frozen=True)
class FunctionSource:
    """A function of the caller's: its text, and the JSON of what it uses of its module and closes over."""

    code: CodeSource
    names: Mapping[str, Any] = field(default_factory=dict)
    defaults: Any = None
    """The JSON of its defaults, a list, and of those by name, an object."""
    kwdefaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class InvokeRequest:
    """One request of a trace: a prompt, the block beside it, the values that it needs and the sampling settings.
    All but the block are still JSON.

    ``function``: the number of the function that is the block, where ``model.run`` was called; ``block`` is None then.
    ``shared``: names that the trace around it has saved.
    """

    prompt: Any
    block: CodeSource | None
    values: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    function: int | None = None
    shared: Sequence[str] = ()


@dataclass(frozen=True)
class TraceRequest:
    """A trace: its invokes, and the functions that their values name.

    What is encoded stays so until ``decoded`` is called. ``TraceBuilder`` makes one at the client.
    """

    invokes: Sequence[InvokeRequest]
    functions: Sequence[FunctionSource] = ()
    tensors: Buffer = b""
    stream: bool = False
    """Whether each step's outputs are wanted as events, or the results alone."""
    kind: str = "trace"
    """``"trace"``; ``"edit"``, one block that is to stay, and no prompt; or ``"generate"``, prompts without blocks."""
    size: int = 0
    """Bytes of the message, as it came."""

    def frame(self) -> Frame:
        """The message, ready for ``encode_frame``."""
        header: dict[str, Any] = {"insitu": VERSION, "kind": self.kind, "stream": self.stream}
        header["invokes"] = [
            {
                "prompt": one.prompt,
                "block": None if one.block is None else one.block.as_json(),
                "values": dict(one.values),
                "sampling": dict(one.sampling),
                "function": one.function,
                "shared": list(one.shared),
            }
            for one in self.invokes
        ]
        header["functions"] = [
            {"code": one.code.as_json(), "names": dict(one.names), "defaults": one.defaults, "kw": dict(one.kwdefaults)}
            for one in self.functions
        ]
        return Frame(header, self.tensors)

    @classmethod
    def of_frame(cls, frame: Frame, limits: WireLimits | None = None) -> TraceRequest:
        """The request that a message is; its values are still JSON. Raises ``WireError``."""
        header = frame.header
        _require(header, {"insitu", "kind", "stream", "invokes", "functions"}, "a trace")
        if header["insitu"] != VERSION:
            raise WireError(f"this server speaks version {VERSION} of the protocol, and the client another", "unknown")
        if header["kind"] not in _KINDS or not isinstance(header["stream"], bool):
            raise WireError("this is neither a trace nor an edit nor prompts")
        invokes, functions = header["invokes"], header["functions"]
        if not isinstance(invokes, list) or not isinstance(functions, list):
            raise WireError("invokes and functions are lists")
        if not 0 < len(invokes) <= _INVOKES or len(functions) > _INVOKES:
            raise WireError(f"a trace has 1 to {_INVOKES} invokes, and at most as many functions", "too-large")
        made = cls(
            tuple(map(_invoke, invokes)),
            tuple(map(_function, functions)),
            frame.whole,
            header["stream"],
            header["kind"],
        )
        codes = {one.block for one in made.invokes if one.block} | {one.code for one in made.functions}
        if sum(len(code.text) for code in codes) > LONGEST:
            raise WireError(f"the code of a request has at most {LONGEST} characters", "too-large")
        for one in made.invokes:
            blocks = (one.block is not None) + (one.function is not None)
            if blocks != (made.kind != "generate"):
                raise WireError("an invoke has a block or a function, or where prompts are sent alone, neither")
            if one.function is not None and not 0 <= one.function < len(functions):
                raise WireError("an invoke names a function that has not come")
        return made

    def decoded(
        self,
        resolve: Callable[[Ref], Any] | None = None,
        limits: WireLimits | None = None,
        arrays: Library = "torch",
    ) -> DecodedTrace:
        """Its values. ``resolve`` gives what a ``Ref`` stands for, a ``FunctionRef`` before the function's own names
        are decoded. Arrays become tensors. Raises ``WireError``, and what ``resolve`` raises.
        """
        decoder = Decoder(TensorReader(self.tensors, limits), limits, resolve, arrays)
        invokes = []
        for one in self.invokes:
            prompt, sampling = decoder.decode(one.prompt), decoder.names(one.sampling)
            invokes.append(DecodedInvoke(prompt, sampling, decoder.names(one.values)))
        functions = []
        for one in self.functions:
            names, defaults = decoder.names(one.names), decoder.decode(one.defaults)
            if not isinstance(defaults, tuple):
                raise WireError("the defaults of a function are a tuple")
            functions.append(DecodedFunction(names, defaults, decoder.names(one.kwdefaults)))
        return DecodedTrace(invokes, functions)


@dataclass(frozen=True)
class DecodedInvoke:
    """What an invoke brings along of its caller."""

    prompt: Any
    sampling: dict[str, Any]
    values: dict[str, Any]


@dataclass(frozen=True)
class DecodedFunction:
    """What a function uses of its module and closes over, and its defaults."""

    names: dict[str, Any]
    defaults: tuple[Any, ...]
    kwdefaults: dict[str, Any]


@dataclass(frozen=True)
class DecodedTrace:
    """The values of a trace, by invoke and by function."""

    invokes: list[DecodedInvoke]
    functions: list[DecodedFunction]


def _invoke(data: Any) -> InvokeRequest:
    _require(data, {"prompt", "block", "values", "sampling", "function", "shared"}, "an invoke")
    function, shared = data["function"], data["shared"]
    if not (function is None or type(function) is int) or not _are_texts(shared):
        raise WireError("the function of an invoke is a number, and shared a list of names")
    if not isinstance(data["values"], dict) or not isinstance(data["sampling"], dict):
        raise WireError("the values and the sampling of an invoke are objects")
    block = None if data["block"] is None else CodeSource.of_json(data["block"])
    return InvokeRequest(data["prompt"], block, data["values"], data["sampling"], function, tuple(shared))


def _function(data: Any) -> FunctionSource:
    _require(data, {"code", "names", "defaults", "kw"}, "a function")
    if not isinstance(data["names"], dict) or not isinstance(data["kw"], dict):
        raise WireError("the names of a function are objects")
    return FunctionSource(CodeSource.of_json(data["code"]), data["names"], data["defaults"], data["kw"])


def _require(data: Any, keys: set[str], what: str) -> None:
    if not isinstance(data, dict) or data.keys() != keys:
        raise WireError(f"{what} has {', '.join(sorted(keys))}")


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
