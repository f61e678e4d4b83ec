"""Every error that the library raises, in one tree.

InsituError
├── SourceError          the source of a block can't be found, or is no longer what was imported
├── BlockSyntaxError     a block holds something that a block can't hold
├── OutsideTraceError    a place was read, or a value saved, outside a running block
├── LocationError        a place in the model could not be served
│   ├── OutOfOrderError      the forward has already gone by it
│   ├── NotReachedError      the forward never came to it
│   ├── UnknownModuleError   the model has no such module
│   └── SharedModuleError    the module serves several places and it can't be told which is meant
├── WriteError           what was written does not fit where it was written
├── PromptError          a prompt that can't be run
├── ArgumentError        an argument that is unknown or of the wrong kind
├── EngineError          the engine can't be built, has died or is closed
├── NotAllowedError      a block from the network asks for something that such a block may not use
├── LimitError           a block from the network has used up what it may use
├── RequestError         a request was aborted, or could not be served as asked
└── BlockError           stands for an exception that could not be carried to the caller

UnsavedWarning           something was changed in a block and then lost, for want of a `save`

Each also derives from the built-in class that fits, so that code which knows nothing of insitu can catch it.
All of them can be pickled and copied, with the attributes set on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "ArgumentError",
    "BlockError",
    "BlockSyntaxError",
    "EngineError",
    "InsituError",
    "LimitError",
    "LocationError",
    "NotAllowedError",
    "NotReachedError",
    "OutOfOrderError",
    "OutsideTraceError",
    "PromptError",
    "RequestError",
    "SharedModuleError",
    "SourceError",
    "UnknownModuleError",
    "UnsavedWarning",
    "WriteError",
]


class InsituError(Exception):
    """Base of every error of the library."""

    invoke: int | None = None
    """Index of the invoke that the error belongs to, where a trace has several."""


class SourceError(InsituError, RuntimeError):
    """The source of a block can't be found, or its file was edited after it was imported."""


class BlockSyntaxError(InsituError, SyntaxError):
    """A block holds something that a block can't hold, such as `return`."""


class OutsideTraceError(InsituError, RuntimeError):
    """A place was read, or a value saved, where no block is running."""


class LocationError(InsituError, RuntimeError):
    """A place in the model could not be served."""

    location: str | None = None
    """Path of the place that was asked for."""


class OutOfOrderError(LocationError):
    """The forward has already gone by the place."""


class NotReachedError(LocationError):
    """The forward ended without coming to the place."""


class UnknownModuleError(LocationError, AttributeError):
    """The model has no module of that name."""


class SharedModuleError(LocationError):
    """The module serves several places, and it can't be told which of them is meant."""


class WriteError(InsituError, ValueError):
    """What was written has a shape or type that does not fit its place."""


class PromptError(InsituError, ValueError):
    """A prompt that can't be run: empty, too long, several where one is wanted."""


class ArgumentError(InsituError, TypeError):
    """An argument that is unknown or of the wrong kind."""


class EngineError(InsituError, RuntimeError):
    """The engine can't be built, has died, or is closed."""


class NotAllowedError(InsituError, PermissionError):
    """A block from the network holds, or asks for, something that is not in the list of what it may do."""


class LimitError(InsituError, RuntimeError):
    """A block from the network has used up what it may use: operations, seconds or memory."""


class RequestError(InsituError, RuntimeError):
    """A request was aborted, or could not be served as it was asked for."""


class BlockError(InsituError, RuntimeError):
    """Stands for an exception that was raised in a block and could not be carried to the caller."""

    original: str | None = None
    """Qualified name of the class of the exception that was raised."""

    @classmethod
    def standing_for(cls, error: BaseException) -> BlockError:
        """A `BlockError` that names the class of `error` and repeats its message."""
        name = qualified_name(type(error))
        try:
            text = str(error)
        except Exception:
            text = "<its message could not be made>"
        stand_in = cls(f"{name}: {text}" if text else name)
        stand_in.original = name
        return stand_in


class UnsavedWarning(UserWarning):
    """Something was changed in a block, and the change is lost because it was not saved."""


@contextmanager
def needing(what: str = "running a model needs vLLM", extra: str = "") -> Iterator[None]:
    """What is imported within; ``EngineError``, saying what to install, where some of it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        raise EngineError(
            f"{what}, and here `{missing}` is missing: pip install 'insitu[cpu{extra}]' for the CPU build, "
            f"'insitu[cuda{extra}]' for NVIDIA GPUs"
        ) from error


def qualified_name(kind: type) -> str:
    """Name of a class as tracebacks write it."""
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"
