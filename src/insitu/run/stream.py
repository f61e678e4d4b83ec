"""One of the standard names, as the place where it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from insitu.run.served import tensors_of
from insitu.tree import Place


@dataclass(frozen=True)
class Stream:
    """A stream as ``multiplier`` times the sum of the first ``count`` floating tensors of one place.

    Positions, which a layer is called with too, are integers.
    """

    place: Place
    count: int = 1
    multiplier: float = 1.0

    def parts(self, value: Any) -> list[torch.Tensor]:
        return [tensor for tensor in tensors_of(value) if tensor.is_floating_point()][: self.count]
