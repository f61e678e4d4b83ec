"""Exceptions that travel with their class, message, notes, causes and the lines they came by."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tblib import Traceback

from insitu.block import BlockError


def reduced_error(error: BaseException, dumps: Callable[[Any], bytes]) -> tuple[Any, ...]:
    """What pickle takes for ``error``. One whose class or content can't travel becomes a ``BlockError``."""
    try:
        body = dumps((error.__reduce_ex__(4), _attributes(error)))
        _rebuilt(*pickle.loads(body))
    except Exception:
        return reduced_error(BlockError.standing_for(error).with_traceback(error.__traceback__), dumps)
    lines = Traceback(error.__traceback__).to_dict() if error.__traceback__ is not None else None
    links = (error.__cause__, error.__context__, error.__suppress_context__)
    return _error_from, (body, lines, links)


def _error_from(body: bytes, lines: dict[str, Any] | None, links: tuple[Any, Any, bool]) -> BaseException:
    error = _rebuilt(*pickle.loads(body))
    if lines is not None:
        error.__traceback__ = Traceback.from_dict(lines).as_traceback()
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
