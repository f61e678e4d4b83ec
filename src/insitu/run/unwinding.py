"""Errors of torch without their C++ stack.

torch notes the stack of each error that it raises. A block's stack is that of a greenlet, and above its first frame
lies whatever the forward has there by then: to walk on into that may end the process. Python's own traceback is
another thing, and is whole.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import torch

_STRING = "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_SET_FETCHER = f"_ZN3c1020SetStackTraceFetcherESt8functionIF{_STRING}vEE"
_STRIP_BASENAME = f"_ZN3c106detail13StripBasenameERK{_STRING}"
_TEXT = ctypes.create_string_buffer(b"(no C++ stack: it can't be walked from inside a block)")


class _Function(ctypes.Structure):
    """A ``std::function<std::string()>`` of libstdc++: two words to call with, how it is copied, what it calls."""

    _fields_ = (
        ("start", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("manager", ctypes.c_void_p),
        ("invoker", ctypes.c_void_p),
    )


def leave_out_stacks() -> bool:
    """Has torch note a text instead; whether it does. With ``TORCH_SHOW_CPP_STACKTRACES`` set, it is left alone."""
    if os.environ.get("TORCH_SHOW_CPP_STACKTRACES", "0") not in ("", "0") or not sys.platform.startswith("linux"):
        return False
    try:
        libc10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        set_fetcher, strip = libc10[_SET_FETCHER], libc10[_STRIP_BASENAME]
    except (OSError, AttributeError):
        return False
    # `const std::string& -> std::string` in machine terms is what a std::function calls, with its own two words as
    # the argument; and those are how a string begins. torch moves the function and never copies it, so that its
    # manager need only be there, and do nothing when it is dropped.
    function = _Function(ctypes.addressof(_TEXT), len(_TEXT.value), _address(ctypes.CDLL(None).abs), _address(strip))
    set_fetcher.argtypes, set_fetcher.restype = [ctypes.POINTER(_Function)], None
    set_fetcher(ctypes.byref(function))
    return True


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


STACKS_ARE_LEFT_OUT = leave_out_stacks()
