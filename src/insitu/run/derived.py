"""A stream of the standard names, as a block sees and edits it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from insitu.run.memory import require_memory
from insitu.run.misfit import misfit
from insitu.run.promise import Promise

Parts = list[torch.Tensor] | Callable[[], list[torch.Tensor]]


class Derived:
    """One stream at the place where the block is: ``multiplier`` times the sum of ``parts``.

    Written rows go whole into the first part and leave zero in the others, so that whoever adds them
    up gets exactly what was written; rows that were not written keep their parts. A part without
    rows (a bias, which the model adds by itself) stays as it is.
    """

    def __init__(self, parts: Parts, what: str, multiplier: float = 1.0, known: torch.Tensor | None = None) -> None:
        """``known``: the value, where it was computed already; ``parts`` then gives them when they are needed."""
        self._parts = parts
        self._what = what
        self._multiplier = multiplier
        self._given: torch.Tensor | None = None
        self._part_versions: list[int] = []
        if known is None:
            parts = self._all_parts()
            self._direct = len(parts) == 1 and multiplier == 1
            self.value: torch.Tensor = parts[0] if self._direct else self._sum(parts)
            self._given = None if self._direct else self.value.clone()
            self._part_versions = [part._version for part in parts]
        else:
            self._direct, self.value = False, known
        # Of a promise, which may have become an ordinary tensor by then, only a comparison tells.
        self._version = self.value._version if type(self.value) is torch.Tensor else None

    def _all_parts(self) -> list[torch.Tensor]:
        return self._parts() if callable(self._parts) else self._parts

    def _sum(self, parts: list[torch.Tensor]) -> torch.Tensor:
        total = sum(parts[1:], parts[0])
        return total if self._multiplier == 1 else total * self._multiplier

    @property
    def stale(self) -> bool:
        """Whether the block has edited the parts under their own names since."""
        if self._direct:
            return False
        versions = [part._version for part in self._all_parts()]
        return versions != (self._part_versions or [0] * len(versions))

    def replace(self, new: Any) -> None:
        """Takes ``new`` for the whole stream. Raises ``WriteError`` for another shape."""
        if new is self.value:
            return
        if not isinstance(new, torch.Tensor) or new.shape != self.value.shape or not new.is_floating_point():
            raise misfit(self._what, self.value, new)
        if not isinstance(new, Promise):
            require_memory(new, f"what was written to {self._what}")
        with torch.no_grad():
            self.value.copy_(new)

    def settle(self) -> None:
        """Hands what was changed on to the parts. If the block has edited these too, under their own names, what
        was added to the stream is added to them."""
        if self._direct or type(self.value) is not torch.Tensor or self.value._version == self._version:
            return
        parts = self._all_parts()
        with torch.no_grad():
            given = self._sum(parts) if self._given is None else self._given
            # A mask, not an index of rows: to make one, a device would be waited for.
            changed = (self.value != given).any(dim=-1, keepdim=True)
            if self.stale:
                added = (self.value - given) / self._multiplier
                parts[0].copy_(torch.where(changed, parts[0] + added, parts[0]))
            else:
                self._write(parts, changed)

    def show(self) -> None:
        """Settles, when the block is about to see the parts: from here on both it and they may be edited."""
        if self._direct:
            return
        if isinstance(self.value, Promise):
            self.value.place.keep()  # the parts are not there otherwise
        self.settle()
        self._given, self._version = self.value.clone(), self.value._version
        self._part_versions = [part._version for part in self._all_parts()]

    def _write(self, parts: list[torch.Tensor], changed: torch.Tensor) -> None:
        first, *others = parts
        written = self.value / self._multiplier
        for other in others:
            if other.shape == first.shape:
                other.masked_fill_(changed, 0)
            else:
                written = written - other
        first.copy_(torch.where(changed, written, first))
