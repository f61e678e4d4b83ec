"""The prompts of a data set, whatever form it has: files of four kinds, folders of them, lists, data sets in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from insitu.block import ArgumentError

COLUMNS = ("text", "prompt", "content", "messages", "input_ids")
"""The columns that prompts are looked for in, in this order."""

_KINDS = {".txt": "text", ".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True)
class Prompt:
    """``id``: what the data set calls it (column ``id``), else its number."""

    id: str
    value: Any


@dataclass(frozen=True)
class Part:
    """Some of a data set's prompts, with the ids that they have in it."""

    data: Any
    column: str | None
    start: int
    stop: int

    def __iter__(self) -> Iterator[Prompt]:
        return islice(iter(self.whole), self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def whole(self) -> Iterable[Prompt]:
        return prompts_of(self.data, self.column)


def prompts_of(data: Any, column: str | None = None) -> Iterable[Prompt]:
    """The prompts of ``data``, again each time that they are gone over; with a length, where it is known.

    ``data``: a path (text: a prompt a line; JSON lines, Parquet, CSV: a row each; a folder: its files of these
    kinds by name), a ``datasets.Dataset`` or ``IterableDataset``, or a list of prompts or rows. ``column`` is where a
    row has its prompt: a text, a list of token ids or a chat.

    Raises ``ArgumentError`` for what is none of these and for rows without such a column.
    """
    if isinstance(data, Part):
        return data
    if isinstance(data, (str, Path)):
        return _Prompts(_loaded(Path(data)), column)
    if isinstance(data, Mapping) or not isinstance(data, Iterable) or isinstance(data, Iterator):
        raise ArgumentError(
            f"data: {type(data).__name__} can't be gone over row by row, twice: give a file, a folder, a list of "
            f"prompts, or a data set of the library `datasets` (of a DatasetDict, one split)"
        )
    return _Prompts(data, column)


class _Prompts:
    def __init__(self, rows: Iterable[Any], column: str | None) -> None:
        self._rows = rows
        self._column = column

    def __iter__(self) -> Iterator[Prompt]:
        for number, row in enumerate(self._rows):
            yield self._prompt(number, row)

    def __length_hint__(self) -> int:
        length = getattr(self._rows, "__len__", None)
        return NotImplemented if length is None else length()

    def _prompt(self, number: int, row: Any) -> Prompt:
        if not isinstance(row, Mapping):
            return Prompt(str(number), row)
        column = self._column or next((name for name in COLUMNS if name in row), None)
        if column is None or column not in row:
            missing = f"no column `{column}`" if column else f"none of the columns {', '.join(COLUMNS)}"
            raise ArgumentError(
                f"data: row {number} has {missing}; it has {', '.join(map(str, row))}: name the one with column="
            )
        if row[column] is None:
            raise ArgumentError(f"data: row {number} has nothing in its column `{column}`")
        return Prompt(str(row.get("id", number)), row[column])


def _loaded(path: Path) -> Iterable[Any]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ArgumentError("reading data sets from files needs more: pip install 'insitu[capture]'") from error
    files = _files(path)
    kinds = {_KINDS[file.suffix.lower()] for file in files}
    if len(kinds) > 1:
        raise ArgumentError(f"data: {path} has files of several kinds ({', '.join(sorted(kinds))}): give one kind")
    names = [str(file) for file in files]
    # Streamed, so that a data set larger than the memory is read as it is used.
    return datasets.load_dataset(kinds.pop(), data_files=names, split="train", streaming=True)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ArgumentError(f"data: there is no {path}")
    known = ", ".join(_KINDS)
    if path.is_file():
        if path.suffix.lower() not in _KINDS:
            raise ArgumentError(f"data: {path.name} is not a kind of file that is read here: {known}")
        return [path]
    found = sorted(file for file in path.rglob("*") if file.suffix.lower() in _KINDS and file.is_file())
    if not found:
        raise ArgumentError(f"data: the folder {path} has no file of a kind that is read here: {known}")
    return found
