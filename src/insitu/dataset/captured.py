"""Reading a capture back, by memory mapping."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.dataset as pads
import torch
from safetensors import safe_open
from torch.utils.data import Dataset

from insitu.dataset.errors import CaptureError
from insitu.dataset.store import INDEX, MANIFEST


class Row(NamedTuple):
    """One prompt at one place: ``values`` is ``[rows, width]``, of the tokens at ``positions`` (None if a function
    made something else of them). The first ``prompt_tokens`` of ``tokens`` are the prompt's."""

    id: str
    tokens: list[int]
    prompt_tokens: int
    positions: list[int] | None
    values: torch.Tensor


class Captured:
    """A capture on disk: ``captured["resid_post[4]"][i]`` is prompt ``i`` there.

    Without this library, the shards are safetensors files with a tensor ``[rows, width]`` for each place, and
    the index is a Parquet file for each shard with a row for each prompt and place.
    Raises ``CaptureError`` if the folder holds no capture, or one that is not complete (``partial=True`` reads that).
    """

    def __init__(self, folder: str | Path, *, partial: bool = False) -> None:
        self.folder: Path = Path(folder)
        path = self.folder / MANIFEST
        if not path.exists():
            raise CaptureError(f"{folder} holds no capture: there is no {MANIFEST}")
        self.manifest: dict[str, Any] = json.loads(path.read_text())
        if not self.manifest["complete"] and not partial:
            raise CaptureError(
                f"the capture in {folder} is not complete: run it again, which goes on with it, or read what is "
                f"there with partial=True"
            )
        self.places: list[str] = self.manifest["places"]
        files = [str(file) for file in sorted(self.folder.glob("shard-*.parquet"))]
        self.index: pa.Table = pads.dataset(files, schema=INDEX).to_table() if files else INDEX.empty_table()

    def __len__(self) -> int:
        """How many prompts there are."""
        return len(self.index) // max(len(self.places), 1)

    def __getitem__(self, place: str) -> PlaceDataset:
        if place not in self.places:
            raise KeyError(f"{place!r} was not captured; there are {', '.join(self.places)}")
        return PlaceDataset(self.folder, place, self.index)

    def __repr__(self) -> str:
        return f"<Captured {self.folder}: {len(self)} prompts at {len(self.places)} places>"


class PlaceDataset(Dataset[Row]):
    """One place of a capture, by prompt: a map-style data set for ``torch.utils.data.DataLoader``."""

    def __init__(self, folder: Path, place: str, index: pa.Table) -> None:
        self._folder = folder
        self._place = place
        self._index = index.filter(pads.field("place") == place).sort_by("number")
        self._rows: torch.Tensor = torch.tensor(self._index["rows"].to_pylist(), dtype=torch.int64)
        self._open: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, number: int) -> Row:
        if not -len(self) <= number < len(self):
            raise IndexError(f"there are {len(self)} prompts; got {number}")
        (row,) = self._index.slice(number % len(self), 1).to_pylist()
        values = self._values(row["shard"], row["start"], row["rows"])
        return Row(row["id"], row["tokens"], row["prompt_tokens"], row["positions"], values)

    @property
    def rows(self) -> RowDataset:
        """The same by row, without regard to prompts."""
        return RowDataset(self)

    def _values(self, shard: str, start: int, count: int) -> torch.Tensor:
        if shard not in self._open:
            self._open[shard] = safe_open(str(self._folder / shard), framework="pt").__enter__()
        file = self._open[shard]
        if not count and self._place not in file.keys():  # noqa: SIM118, not a mapping
            return torch.empty(0)
        return file.get_slice(self._place)[start : start + count]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}


class RowDataset(Dataset[torch.Tensor]):
    """Every captured row of one place, in order."""

    def __init__(self, prompts: PlaceDataset) -> None:
        self._prompts = prompts
        self._ends = prompts._rows.cumsum(0)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, number: int) -> torch.Tensor:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Rows by number, as a loader asks for a batch of them."""
        found = []
        for number in numbers:
            if not 0 <= number < len(self):
                raise IndexError(f"there are {len(self)} rows; got {number}")
            prompt = int(torch.searchsorted(self._ends, number, right=True))
            before = int(self._ends[prompt - 1]) if prompt else 0
            row = self._prompts._index.slice(prompt, 1).to_pylist()[0]
            found.append(self._prompts._values(row["shard"], row["start"] + number - before, 1)[0])
        return found
