"""What the taps of a model are asked for, and how a step's forward may run beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

import torch

from insitu.run.anatomy import Anatomy
from insitu.run.block_run import BlockRun
from insitu.run.promised import Target
from insitu.run.served import Rows
from insitu.run.structure import tensors_in
from insitu.run.visit import TableEdit
from insitu.tree import Place

Edits = Mapping[Place, Mapping[BlockRun, Target | TableEdit]]


class Path(Enum):
    """How a step's forward runs. ``TAPPED``: as vLLM would run it. ``OPEN``: compiled, but not as one graph."""

    PLAIN = "plain"
    TAPPED = "tapped"
    OPEN = "open"
    EAGER = "eager"


class Taps(Protocol):
    """The taps of one model."""

    @property
    def places(self) -> Sequence[Place]: ...

    def copies(self, place: Place, rows: int) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """What the last forward left in the copies of ``place``: floating tensors and others."""
        ...

    def editable(self, place: Place) -> list[torch.Tensor] | None:
        """The floating copies of ``place``, if a table can edit it."""
        ...

    def fits(self, edits: Edits) -> bool:
        """Whether the tables have room for these."""
        ...

    def set(self, edits: Edits, rows: Mapping[BlockRun, Rows]) -> None:
        """Makes the graphs do these edits, and no others, in the blocks' rows."""
        ...


def layer_outputs(anatomy: Anatomy) -> set[Place]:
    """What a layer returns is its own: the stream goes on from it, and nobody else holds it."""
    return {anatomy.stream("resid_post", layer).place for layer in range(anatomy.layers)}


def put_in_place(value: Any, floating: Sequence[torch.Tensor]) -> None:
    """Copies the floating tensors of ``value`` into those that stand for them, where they are others."""
    for live, new in zip(floating, tensors_in(value).floating, strict=True):
        if new is not live:
            live.copy_(new)
