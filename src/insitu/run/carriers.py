"""The greenlets that blocks run in, one block after another.

A greenlet takes memory from the system for its first Python frame and gives it back at its end. In a process of
several threads that takes longer than all else that a block does, and what the forward runs next is slower for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from greenlet import getcurrent, greenlet

OVER: Any = object()
"""What a greenlet gives when its block has ended."""
_MOST = 64


class _Idle(threading.local):
    """Those of this thread that wait for a block, which can run in no other."""

    def __init__(self) -> None:
        self.greenlets: list[greenlet] = []


_idle = _Idle()


def carrier() -> greenlet:
    """A greenlet in a copy of the present context. Its first ``switch`` takes the function to be called in it, which
    says whether it can be used again."""
    if _idle.greenlets:
        found = _idle.greenlets.pop()
    else:
        found = greenlet(_carry)
        found.switch()
    found.gr_context = copy_context()
    return found


def _carry() -> Any:
    answer = None
    while True:
        hub = getcurrent().parent
        assert hub is not None, "only the main greenlet has none"
        main: Callable[[], bool] = hub.switch(answer)
        again = main()
        del hub, main
        if not again or len(_idle.greenlets) >= _MOST:
            return OVER
        _idle.greenlets.append(getcurrent())
        answer = OVER
