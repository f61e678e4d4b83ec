"""How far many requests have come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm

LEAST = 100
"""Fewer requests have no bar."""


@contextmanager
def advancing(total: int, shown: bool) -> Iterator[Callable[[int], object]]:
    """Gives what is called with how many more have ended. Where there is a terminal or a notebook, a bar shows it."""
    if not shown or total < LEAST:
        yield lambda count: None
        return
    with tqdm(total=total, unit="request", disable=None, dynamic_ncols=True) as bar:
        yield bar.update
