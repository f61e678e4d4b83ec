"""Records what a run's model computes at many places, while the block goes its own way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from insitu.block import ArgumentError, RequestError
from insitu.run.cache import Cache, Records
from insitu.run.modules import ModuleTable
from insitu.run.served import Rows, Withheld, rebuilt, storage_of
from insitu.tree import Outline, Place, matching

_InferenceMode: Any = torch._C._InferenceMode


class Recorder(Protocol):
    """What gets the values at ``places`` in a run's steps, from ``first_step`` on. ``paths`` are those of the
    modules whose calls must be watched for it."""

    first_step: int

    @property
    def places(self) -> frozenset[Place]: ...

    @property
    def paths(self) -> list[str]: ...

    def record(self, place: Place, step: int, live: Any, rows: Rows, fixed: frozenset[int]) -> None:
        """``live``: what the model goes on with."""
        ...

    def forget(self, step: int) -> None:
        """Drops what was recorded of ``step``, which is going to be run again."""
        ...


class CacheRecorder:
    """Fills one cache of one run."""

    def __init__(
        self,
        table: ModuleTable,
        modules: Any,
        *,
        inputs: bool,
        outputs: bool,
        device: Any,
        dtype: Any,
        first_step: int,
        withhold: bool = False,
        room: int | None = None,
    ) -> None:
        self._withhold = withhold
        self._room = room
        sites = [site for site, wanted in (("input", inputs), ("output", outputs)) if wanted]
        if not sites:
            raise ArgumentError("a cache records inputs or outputs, or both: give inputs=True or outputs=True")
        self._device, self._dtype = _destination(device, dtype)
        outline = table.outline()
        wanted = matching(modules, outline)
        self.places: frozenset[Place] = frozenset(Place(path, site) for path in wanted for site in sites)
        # Which path of a shared module is being called is told by the calls of its owners.
        owned = (each for path in wanted for each in (path, *table.owners(path)))
        self.paths: list[str] = list(dict.fromkeys(owned))
        self.first_step = first_step
        self._records = Records(_lists(wanted, outline))
        self.cache: Cache = Cache(self._records)

    def record(self, place: Place, step: int, live: Any, rows: Rows, fixed: frozenset[int]) -> None:
        """Adds the request's own copy of ``live``, which is what the model goes on with."""
        with _InferenceMode(False):  # what is copied inside it can't be used freely later
            self._records.add(place, step, self._own(live, rows, fixed))

    def forget(self, step: int) -> None:
        self._records.drop(step)

    def _take_room(self, value: torch.Tensor) -> None:
        if self._room is not None:
            self._room -= value.numel() * value.element_size()
            if self._room < 0:
                raise RequestError("the cache of this block would hold more bytes than it may: record fewer modules")

    def _own(self, value: Any, rows: Rows, fixed: frozenset[int]) -> Any:
        if isinstance(value, torch.Tensor):
            index = None if storage_of(value) in fixed else rows.of(value)
            if index is None and self._withhold:
                return Withheld(value).__repr__()
            mine = value if index is None else value[index]
            self._take_room(mine)
            dtype = self._dtype if value.is_floating_point() else None
            return mine.detach().to(self._device, dtype, copy=True, memory_format=torch.contiguous_format)
        if isinstance(value, (tuple, list)):
            return rebuilt(value, [self._own(part, rows, fixed) for part in value])
        if isinstance(value, dict):
            return {key: self._own(part, rows, fixed) for key, part in value.items()}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        return f"<{type(value).__name__}>"  # the model's own objects stay where they are


def _lists(paths: Iterable[str], outline: Outline) -> dict[str, int]:
    """How many modules each list on the way to one of these has."""
    lists: dict[str, int] = {}
    for path in paths:
        while path:
            path, _, name = path.rpartition(".")
            if name.isdigit() and path not in lists:
                lists[path] = sum(child.isdigit() for child in outline.children(path))
    return lists


def _destination(device: Any, dtype: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Checked now, so that a wrong one is an error on the line that asks for it."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(f"a cache's dtype is a floating dtype of torch or None; got {dtype!r}")
    try:
        return (None if device is None else torch.empty(0, device=device).device), dtype
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ArgumentError(f"a cache can't be kept on device {device!r}: {error}") from error
