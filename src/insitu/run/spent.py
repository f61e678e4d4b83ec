"""How long blocks have run in this process."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

_seconds = 0.0


def timed(switch: Callable[..., Any], *value: Any) -> Any:
    """Calls ``switch``, which lets a block go on until it waits again or ends."""
    global _seconds
    began = perf_counter()
    try:
        return switch(*value)
    finally:
        _seconds += perf_counter() - began


def seconds_in_blocks() -> float:
    """Of all blocks so far."""
    return _seconds
