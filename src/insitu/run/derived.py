"""A stream of the standard names, as a block sees and edits it."""

from __future__ import annotations

from typing import Any

import torch

from insitu.block import WriteError
from insitu.run.memory import require_memory


class Derived:
    """One stream at the place where the block is: ``multiplier`` times the sum of ``parts``.

    Written rows go whole into the first part and leave zero in the others, so that whoever adds them
    up gets exactly what was written; rows that were not written keep their parts. A part without
    rows (a bias, which the model adds by itself) stays as it is.
    """

    def __init__(self, parts: list[torch.Tensor], what: str, multiplier: float = 1.0) -> None:
        self._parts = parts
        self._what = what
        self._multiplier = multiplier
        direct = len(parts) == 1 and multiplier == 1
        self.value = parts[0] if direct else sum(parts[1:], parts[0]) * multiplier
        self._given = None if direct else self.value.clone()
        self._version = self.value._version
        self._part_versions = [part._version for part in parts]

    @property
    def stale(self) -> bool:
        """Whether the block has edited the parts under their own names since."""
        return self._given is not None and self._part_versions != [part._version for part in self._parts]

    def replace(self, new: Any) -> None:
        """Takes ``new`` for the whole stream. Raises ``WriteError`` for another shape."""
        if not isinstance(new, torch.Tensor) or new.shape != self.value.shape or not new.is_floating_point():
            got = f"{tuple(new.shape)} {new.dtype}" if isinstance(new, torch.Tensor) else type(new).__name__
            raise WriteError(f"{self._what} takes shape {tuple(self.value.shape)} {self.value.dtype}; got {got}")
        require_memory(new, f"what was written to {self._what}")
        with torch.no_grad():
            self.value.copy_(new)

    def settle(self) -> None:
        """Hands what was changed on to the parts."""
        if self._given is None or self.value._version == self._version:
            return
        with torch.no_grad():
            changed = (self.value != self._given).any(dim=-1)
            first, *others = self._parts
            written = self.value[changed] / self._multiplier
            for other in others:
                if other.shape == first.shape:
                    other[changed] = 0
                else:
                    written = written - other
            first[changed] = written
