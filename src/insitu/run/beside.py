"""What a run asks of the model that it runs beside, and what there is to know of the requests that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from insitu.run.anatomy import Anatomy
from insitu.run.modules import ModuleTable
from insitu.tree import Listing, Place

if TYPE_CHECKING:
    import torch

    from insitu.run.block_run import BlockRun
    from insitu.run.foreseen import Foreseen, Known
    from insitu.run.packed import Members
    from insitu.run.recorder import Recorder


class Model(Protocol):
    anatomy: Anatomy
    modules: ModuleTable

    def check(self, run: BlockRun, place: Place) -> None:
        """Raises if ``place`` can't come any more in this step."""
        ...

    def position(self, place: Place, after: int) -> int: ...

    def operations(self, path: str, op: str) -> Listing: ...

    def call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def unembed(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def record(self, run: BlockRun, recorder: Recorder) -> None: ...


class Many(Protocol):
    """Requests that one run stands for: ``members``, in the order of their rows, and how many each has."""

    members: Members
    counts: Sequence[int]

    @property
    def requests(self) -> tuple[str, ...]:
        """Their names, in the same order."""
        ...

    def foresee(self, known: Known) -> Foreseen | None:
        """What tables are to do of the step that has begun; None if they can't."""
        ...
