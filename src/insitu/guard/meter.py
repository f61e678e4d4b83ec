"""Counts what one run of a restricted block uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from insitu.guard.errors import Exceeded
from insitu.guard.limits import GuardLimits

__all__ = ["Meter"]

_CLOCK_EVERY = 64
_SWEEP = 256
_OF_A_TENSOR = 500


class Meter:
    """What has been used so far. Once a limit is exceeded, every further operation raises ``Exceeded``."""

    def __init__(self, limits: GuardLimits) -> None:
        self.limits = limits
        self.exceeded: str | None = None
        self.operations = 0
        self._python = 0
        self._spent = 0.0
        self._since: float | None = None
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._live = 0
        self._sweep_at = _SWEEP

    # -- operations and time --------------------------------------------------------------

    def tick(self, count: int = 1) -> None:
        """Counts operations."""
        self.operations += count
        if self.exceeded is not None:
            raise Exceeded(self.exceeded)
        if self.operations > self.limits.operations:
            self.stop(f"it has done {self.limits.operations} operations")
        if self.operations % _CLOCK_EVERY < count:
            self.clock()

    def clock(self) -> None:
        """Looks at the time, as what comes may take long."""
        if self._seconds() > self.limits.seconds:
            self.stop(f"it has run for {self.limits.seconds} seconds")

    def stop(self, why: str) -> NoReturn:
        self.exceeded = self.exceeded or why
        raise Exceeded(self.exceeded)

    def start(self) -> None:
        """The block runs from here on."""
        self._since = time.monotonic()

    def pause(self) -> None:
        """It waits, or has ended."""
        self._spent, self._since = self._seconds(), None

    def _seconds(self) -> float:
        return self._spent + (0.0 if self._since is None else time.monotonic() - self._since)

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items, each counted."""
        for item in items:
            self.tick()
            yield item

    # -- Python's own values --------------------------------------------------------------

    def text(self, length: int) -> None:
        """A text or bytes of this length is going to be made."""
        if length > self.limits.text:
            self.stop(f"a text of {length} characters is longer than {self.limits.text}")
        self._charge(length)

    def items(self, count: int) -> None:
        """A container with so many items is going to be made."""
        if count > self.limits.items:
            self.stop(f"a container of {count} items is larger than {self.limits.items}")
        self._charge(8 * count)
        self.tick(1 + count // 64)

    def bits(self, count: int) -> None:
        """An int of so many bits is going to be made."""
        if count > self.limits.int_bits:
            self.stop(f"an int of {count} bits is larger than {self.limits.int_bits}")

    def tensors(self, count: int) -> None:
        """So many tensors are going to be made that share memory."""
        self.items(count)
        self._charge(_OF_A_TENSOR * count)

    def _charge(self, size: int) -> None:
        self._python += size
        if self._python > self.limits.python_bytes:
            self.stop(f"it has made more than {self.limits.python_bytes} bytes of texts and containers")

    # -- tensors --------------------------------------------------------------------------

    def allocate(self, size: int, what: str) -> None:
        """A tensor of ``size`` bytes is going to be made by ``what``."""
        if size > self.limits.value_bytes:
            self.stop(f"`{what}` would make a tensor of {size} bytes, more than {self.limits.value_bytes}")
        if self._live + size > self.limits.live_bytes:
            self._sweep()
            if self._live + size > self.limits.live_bytes:
                self.stop(f"it would hold more than {self.limits.live_bytes} bytes of tensors")

    def hold(self, tensor: torch.Tensor) -> None:
        """The block has got a tensor, whose memory counts for as long as anything holds it."""
        if tensor.layout != torch.strided or tensor.is_meta:
            return
        with torch._C.DisableTorchFunctionSubclass():  # it is not asked for its values, which may be still to come
            storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._storages.get(key)
        if known is not None and not known[0].expired():
            return
        if known is not None:
            self._live -= known[1]
        self._storages[key] = (StorageWeakRef(storage), storage.nbytes())
        self._live += storage.nbytes()
        if len(self._storages) >= self._sweep_at:
            self._sweep()
            self._sweep_at = 2 * len(self._storages) + _SWEEP
        if self._live > self.limits.live_bytes:
            self.allocate(0, "it")

    def _sweep(self) -> None:
        gone = [key for key, (reference, _) in self._storages.items() if reference.expired()]
        for key in gone:
            self._live -= self._storages.pop(key)[1]

    @contextmanager
    def paused(self, leave: Callable[[], None], enter: Callable[[], None]) -> Iterator[None]:
        """While the block waits for the forward."""
        self.pause()
        leave()
        try:
            yield
        finally:
            enter()
            self.start()
