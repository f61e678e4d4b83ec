"""What the taps of a model are asked for, and how a step's forward may run beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

Spans = Mapping[str, tuple[int, int]]
"""The rows of requests by name, from one to before another."""
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

    def take(self, edits: Edits) -> Any:
        """Has the tables do these edits, and no others, from the next ``lay`` on. Returns what a rank that follows has
        to be told; None if they are those taken last."""
        ...

    def follow(self, plan: Any) -> None:
        """On such a rank: has the tables do what those of rank 0 do."""
        ...

    def share(self, plan: Any, broadcast: Callable[[torch.Tensor], None]) -> None:
        """By all ranks: the vectors that are new in a plan are those of rank 0."""
        ...

    def lay(self, rows: Mapping[Any, Rows], spans: Spans) -> None:
        """The edits are made in the rows that the blocks and requests have from here on."""
        ...

    def clear(self) -> None:
        """Makes the graphs do no edits."""
        ...

    def faults(self) -> Sequence[float]:
        """How far each table edits rows otherwise than it should."""
        ...


def layer_outputs(anatomy: Anatomy) -> set[Place]:
    """What a layer returns is its own: the stream goes on from it, and nobody else holds it."""
    return {anatomy.stream("resid_post", layer).place for layer in range(anatomy.layers)}


def put_in_place(value: Any, floating: Sequence[torch.Tensor]) -> None:
    """Copies the floating tensors of ``value`` into those that stand for them, where they are others."""
    for live, new in zip(floating, tensors_in(value).floating, strict=True):
        if new is not live:
            live.copy_(new)
