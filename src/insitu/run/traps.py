"""Every point at which a block gives way to the forward, and how it is brought back."""

from __future__ import annotations

from greenlet import getcurrent

from insitu.run.served import Served
from insitu.tree import Place


def wait(place: Place) -> Served:
    """Suspends the running block until ``place`` is served; returns what is served there.

    Raises, on the block's own line, what the other side throws instead.
    """
    hub = getcurrent().parent
    assert hub is not None, "a block waits only while the forward drives it"
    return hub.switch(place)
