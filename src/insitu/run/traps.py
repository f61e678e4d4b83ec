"""Every point at which a block gives way to the forward, and how it is brought back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar

from greenlet import getcurrent

from insitu.run.served import Served
from insitu.tree import Place

around: ContextVar[Callable[[], AbstractContextManager[None]] | None] = ContextVar("insitu_around", default=None)
"""What a block is to be taken out of for as long as it waits."""


def wait(place: Place) -> Served:
    """Suspends the running block until ``place`` is served; returns what is served there.

    Raises, on the block's own line, what the other side throws instead.
    """
    hub = getcurrent().parent
    assert hub is not None, "a block waits only while the forward drives it"
    pause = around.get()
    if pause is None:
        return hub.switch(place)
    with pause():
        return hub.switch(place)
