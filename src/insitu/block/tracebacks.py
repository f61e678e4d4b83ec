"""Tracebacks that show the user's own lines and none of the library's.

A manager's `__exit__` raises an error without its own frame in the traceback like this, in the outermost
function of the library (a bare `raise` puts no new entry for its frame before the traceback it finds):

    context = error.__context__
    try:
        raise error
    except BaseException as raised:
        set_traceback(raised, user_traceback(error), context)
        raise
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Coroutine
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

__all__ = ["async_user_lines", "is_library_file", "set_traceback", "shows_library", "user_lines", "user_traceback"]

P = ParamSpec("P")
T = TypeVar("T")

_HERE = sys._getframe().f_code.co_filename
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "")


def user_traceback(error: BaseException) -> TracebackType | None:
    """The traceback of `error` without frames of this library.

    With `INSITU_DEBUG=1` in the environment it is the whole one.
    """
    if shows_library():
        return error.__traceback__
    entries = []
    entry = error.__traceback__
    while entry is not None:
        if not is_library_file(entry.tb_frame.f_code.co_filename):
            entries.append(entry)
        entry = entry.tb_next
    rebuilt = None
    for entry in reversed(entries):
        rebuilt = TracebackType(rebuilt, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rebuilt


def user_lines(function: Callable[P, T]) -> Callable[P, T]:
    """A function of the public face, whose errors show the user's own lines only."""

    @functools.wraps(function)
    def door(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            set_traceback(error, user_traceback(error), error.__context__)
            raise

    return door


def async_user_lines(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """The same of a coroutine function."""

    @functools.wraps(function)
    async def door(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await function(*args, **kwargs)
        except BaseException as error:
            set_traceback(error, user_traceback(error), error.__context__)
            raise

    return door


def shows_library() -> bool:
    """Whether the user has asked to see frames of the library."""
    return os.environ.get("INSITU_DEBUG") == "1"


def is_library_file(filename: str) -> bool:
    """Whether code with this file name is part of the library."""
    return filename.startswith(_PACKAGE)


def user_frame() -> FrameType:
    """The innermost frame that is not the library's."""
    frame = sys._getframe(1)
    while is_library_file(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def set_traceback(error: BaseException, traceback: TracebackType | None, context: BaseException | None) -> None:
    """Give an error that is being handled what a bare `raise` shall raise it with."""
    if sys.version_info < (3, 11):
        _replace_caught_entry(traceback)
    error.__traceback__ = traceback
    error.__context__ = context


class _TracebackLayout(ctypes.Structure):
    """A traceback object of CPython 3.10."""

    _fields_ = [
        ("refcount", ctypes.c_ssize_t),
        ("type", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
        ("frame", ctypes.py_object),
        ("lasti", ctypes.c_int),
        ("lineno", ctypes.c_int),
    ]


def _replace_caught_entry(traceback: TracebackType | None) -> None:
    """Turn the entry of the frame that caught an error into the first of `traceback`; it stays if there is none.

    A bare `raise` of Python 3.10 goes on with the traceback object that was caught, whatever the error's
    attribute says.
    """
    caught = sys.exc_info()[2]
    if caught is None or caught is traceback:
        return
    caught.tb_next = traceback.tb_next if traceback is not None else None
    if traceback is None:
        return
    layout = _TracebackLayout.from_address(id(caught))
    replaced = layout.frame
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(traceback.tb_frame))
    layout.frame = traceback.tb_frame
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(replaced))
    layout.lasti = traceback.tb_lasti
    layout.lineno = traceback.tb_lineno
