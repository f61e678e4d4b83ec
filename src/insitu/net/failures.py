"""Exceptions as data: class, message and the user's own lines. No class of the other side's is looked up."""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Iterator
from types import FrameType, FunctionType, TracebackType
from typing import Any

from insitu.block import BlockError, InsituError, errors, user_traceback
from insitu.block.errors import qualified_name
from insitu.net.errors import FormError, WireError
from insitu.net.sources import is_remote, local_name

__all__ = ["error_of", "failure_of"]

_LINES = 50
_TEXT = 20_000
_CHAIN = 8
_OURS: dict[str, type[BaseException]] = {name: getattr(errors, name) for name in errors.__all__}
_OURS = {name: kind for name, kind in _OURS.items() if issubclass(kind, InsituError)}
_OURS |= {"WireError": WireError, "FormError": FormError}
_PYTHONS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, (UnicodeError, ImportError))
}
_PLAIN = (str, int, float, bool, type(None))


def failure_of(error: BaseException, *, everything: bool = False) -> dict[str, Any]:
    """The JSON of an error, for the client whose block it came from.

    Its traceback has the lines of that client's code alone, or with ``everything`` all but insitu's own.
    """
    return _failure(error, everything, _CHAIN)


def error_of(data: Any) -> BaseException:
    """The exception, with a traceback of those lines. Raises ``WireError``.

    One of insitu's classes or of Python's is of that class; for another stands a ``BlockError`` that names it.
    """
    return _error(data, _CHAIN)


def _failure(error: BaseException, everything: bool, depth: int) -> dict[str, Any]:
    try:
        message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    except Exception:
        message = "<its message could not be made>"
    found: dict[str, Any] = {"type": qualified_name(type(error)), "message": message[:_TEXT]}
    found["lines"] = [list(line) for line in _lines(error, everything)]
    kept = {name: getattr(error, name, None) for name in ("location", "invoke", "name", "original", "code")}
    if kept := {name: value for name, value in kept.items() if value is not None and isinstance(value, _PLAIN)}:
        found["attributes"] = kept
    if notes := [str(note)[:_TEXT] for note in getattr(error, "__notes__", ())[:_CHAIN]]:
        found["notes"] = notes
    if depth and isinstance(members := getattr(error, "exceptions", None), tuple):
        found["exceptions"] = [_failure(member, everything, depth - 1) for member in members]
    if depth and error.__cause__ is not None:
        found["cause"] = _failure(error.__cause__, everything, depth - 1)
    elif depth and error.__context__ is not None and not error.__suppress_context__:
        found["context"] = _failure(error.__context__, everything, depth - 1)
    return found


def _lines(error: BaseException, everything: bool) -> list[tuple[str, int, str]]:
    lines: list[tuple[str, int, str]] = []
    entry = user_traceback(error)
    while entry is not None:
        code = entry.tb_frame.f_code
        if everything or is_remote(code.co_filename):
            lines.append((local_name(code.co_filename), entry.tb_lineno, code.co_name))
        entry = entry.tb_next
    return lines if len(lines) <= 2 * _LINES else lines[:_LINES] + lines[-_LINES:]


def _error(data: Any, depth: int) -> BaseException:
    if not isinstance(data, dict) or not isinstance(data.get("type"), str) or not isinstance(data.get("message"), str):
        raise WireError("an error has a type and a message")
    error = _made(data, depth)
    attributes = data.get("attributes", {})
    if not isinstance(attributes, dict) or not all(isinstance(value, _PLAIN) for value in attributes.values()):
        raise WireError("the attributes of an error are plain values")
    for name in ("location", "invoke", "name", "original", "code"):
        if name in attributes:
            setattr(error, name, attributes[name])
    error.__traceback__ = _traceback(data.get("lines", []))
    notes = data.get("notes", [])
    if not isinstance(notes, list):
        raise WireError("the notes of an error are a list")
    for note in notes:
        if isinstance(note, str) and sys.version_info >= (3, 11):
            error.add_note(note)
    if depth and "cause" in data:
        error.__cause__ = _error(data["cause"], depth - 1)
    if depth and "context" in data:
        error.__context__ = _error(data["context"], depth - 1)
    return error


def _made(data: dict[str, Any], depth: int) -> BaseException:
    name, message = data["type"], data["message"]
    if name.endswith("ExceptionGroup") and isinstance(members := data.get("exceptions"), list) and members and depth:
        parts = [_error(member, depth - 1) for member in members[:1000]]
        group: Any = getattr(builtins, "BaseExceptionGroup", None)
        if group is None:
            group = importlib.import_module("exceptiongroup").BaseExceptionGroup
        text = message.rpartition(" (")[0] or message
        return group(text, parts)
    kind = _OURS.get(name.rpartition(".")[2]) if name.startswith("insitu.") else _PYTHONS.get(name)
    if kind is not None:
        try:
            return kind(message)
        except Exception:
            kind = None
    stand_in = BlockError(f"{name}: {message}" if message else name)
    stand_in.original = name
    return stand_in


def _traceback(lines: Any) -> TracebackType | None:
    if not isinstance(lines, list) or len(lines) > 2 * _LINES:
        raise WireError("the lines of an error are a list of at most 100")
    made = None
    for line in reversed(list(_checked(lines))):
        made = TracebackType(made, _frame(*line), 0, line[1])
    return made


def _checked(lines: list[Any]) -> Iterator[tuple[str, int, str]]:
    for line in lines:
        kinds = [type(part) for part in line] if isinstance(line, list) else None
        if kinds != [str, int, str] or not 0 < line[1] < 1 << 31 or "\0" in line[0] + line[2]:
            raise WireError("a line of an error is a file, a number and a name")
        yield line[0], line[1], line[2]


def _here() -> FrameType:
    return sys._getframe()


def _frame(filename: str, line: int, name: str) -> FrameType:
    """A frame that says it is at that line. Nothing of the file is run."""
    code = _here.__code__.replace(co_filename=filename, co_name=name, co_firstlineno=line)
    return FunctionType(code, {"sys": sys})()
