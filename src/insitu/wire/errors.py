"""Exceptions that travel with their class, message, notes, causes and the lines they came by."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace, TracebackType
from typing import Any

from tblib import Traceback

from insitu.block import BlockError

_ENDS = 50
"""Of a traceback that is longer than two of these, this many lines travel from its beginning and from its end."""

Line = tuple[str, str, str | None, str | None, int]


def reduced_error(error: BaseException, dumps: Callable[[Any], bytes]) -> tuple[Any, ...]:
    """What pickle takes for ``error``. One whose class or content can't travel becomes a ``BlockError``."""
    body = _body(error, dumps)
    if body is None:
        return reduced_error(BlockError.standing_for(error).with_traceback(error.__traceback__), dumps)
    links = (error.__cause__, error.__context__, error.__suppress_context__)
    return _error_from, (body, lines_of(error.__traceback__), links)


def _body(error: BaseException, dumps: Callable[[Any], bytes]) -> bytes | None:
    """A constructor may take other arguments than it hands on as ``args``: then it is not asked again."""
    unasked = (_bare, (type(error), error.args), dict(vars(error)))
    for reduce in (lambda: error.__reduce_ex__(4), lambda: unasked):
        try:
            body = dumps((reduce(), _attributes(error)))
            if type(_rebuilt(*pickle.loads(body))).__qualname__ == type(error).__qualname__:
                return body
        except Exception:
            continue
    return None


def _bare(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    return error


def shortened(error: BaseException) -> BlockError:
    """A stand-in for an error that can't travel, with the lines it came by and nothing else."""
    return BlockError.standing_for(error).with_traceback(_traceback_from(lines_of(error.__traceback__)))


def lines_of(traceback: TracebackType | None) -> list[Line]:
    """The lines of a traceback, without the middle of a very long one."""
    lines: list[Line] = []
    while traceback is not None:
        code, names = traceback.tb_frame.f_code, traceback.tb_frame.f_globals
        lines.append(
            (code.co_filename, code.co_name, names.get("__name__"), names.get("__file__"), traceback.tb_lineno)
        )
        traceback = traceback.tb_next
    return lines if len(lines) <= 2 * _ENDS else lines[:_ENDS] + lines[-_ENDS:]


def _traceback_from(lines: list[Line]) -> TracebackType | None:
    following = None
    for filename, function, module, file, number in reversed(lines):
        frame = SimpleNamespace(
            f_code=SimpleNamespace(co_filename=filename, co_name=function),
            f_globals={key: value for key, value in (("__name__", module), ("__file__", file)) if value is not None},
            f_lineno=number,
        )
        following = SimpleNamespace(tb_frame=frame, tb_lineno=number, tb_next=following)
    return Traceback(following).as_traceback() if following is not None else None


def _error_from(body: bytes, lines: list[Line], links: tuple[Any, Any, bool]) -> BaseException:
    error = _rebuilt(*pickle.loads(body))
    error.__traceback__ = _traceback_from(lines)
    error.__cause__, error.__context__, error.__suppress_context__ = links
    return error


def _attributes(error: BaseException) -> dict[str, Any]:
    """What exceptions of Python itself know and don't pickle."""
    return {name: getattr(error, name) for name in ("name", "path") if isinstance(getattr(error, name, None), str)}


def _rebuilt(reduced: Any, attributes: dict[str, Any]) -> BaseException:
    make, args, *rest = reduced
    error = make(*args)
    if not isinstance(error, BaseException):
        raise TypeError(f"{make!r} makes no exception")
    if rest and rest[0] is not None:
        if hasattr(error, "__setstate__"):
            error.__setstate__(rest[0])
        else:
            error.__dict__.update(rest[0])
    for name, value in attributes.items():
        with suppress(AttributeError):
            setattr(error, name, value)
    return error
