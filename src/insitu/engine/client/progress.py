"""How far many requests have come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from tqdm.auto import tqdm

LEAST = 100
"""Fewer requests have no bar."""


def advancing(total: int, shown: bool) -> AbstractContextManager[Callable[[int], object]]:
    """Gives what is called with how many more have ended. Where there is a terminal or a notebook, a bar shows it."""
    return _bar(total) if shown and total >= LEAST else nullcontext(_ignore)


def _ignore(count: int) -> None: ...


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int], object]]:
    with tqdm(total=total, unit="request", disable=None, dynamic_ncols=True) as bar:
        yield bar.update
