"""Ctrl-C in a worker process, which gets it along with its client."""

from __future__ import annotations

import signal
import threading
from typing import Any

from insitu.tree import current


def interrupt_blocks_only() -> None:
    """A block's own code is interrupted; vLLM's is not, since the client decides what becomes of the engine."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _interrupted)


def _interrupted(number: int, frame: Any) -> None:
    if current.get() is not None:
        raise KeyboardInterrupt
