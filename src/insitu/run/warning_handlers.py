"""The handler of warnings that torch keeps for each thread.

Most of torch's functions set it to one on their own stack, and put back what was there when they return. A block that
waits inside such a function leaves it in another order than the forward leaves those that it was called from; without
a handler of its own it would put back one that is gone, and the next warning would be a jump to nowhere.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch


def _function(symbol: str, arguments: list[Any], result: Any) -> Any:
    found = getattr(ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so")), symbol)
    found.argtypes, found.restype = arguments, result
    return found


try:
    present = _function("_ZN3c1012WarningUtils19get_warning_handlerEv", [], ctypes.c_void_p)
    put = _function("_ZN3c1012WarningUtils19set_warning_handlerEPNS_14WarningHandlerE", [ctypes.c_void_p], None)
    are_kept: bool = True
    """Whether blocks have handlers of their own, and so may wait inside torch's functions."""
except (OSError, AttributeError):
    are_kept = False

    def present() -> int | None:
        return None

    def put(handler: int | None) -> None: ...


def taken() -> int | None:
    """The present one; torch's own, which is nobody's, is in place of it then."""
    handler = present()
    put(None)
    return handler


def _of_nobody() -> int | None:
    before = taken()
    own = present()
    put(before)
    return own


OF_NOBODY = _of_nobody()
