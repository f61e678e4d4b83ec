"""A capture on disk: shards that are whole or not there, each with its index, and a manifest.

A shard is committed by the last of two renames, that of its index. What a process that was killed leaves
besides is removed when the capture is gone on with.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from insitu.dataset.errors import CaptureError

MANIFEST = "manifest.json"
INDEX = pa.schema(
    [
        ("number", pa.int64()),
        ("id", pa.string()),
        ("place", pa.dictionary(pa.int32(), pa.string())),
        ("shard", pa.string()),
        ("start", pa.int64()),
        ("rows", pa.int64()),
        ("positions", pa.list_(pa.int32())),
        ("tokens", pa.list_(pa.int32())),
        ("prompt_tokens", pa.int32()),
    ]
)
_BEGUN = b"insitu.begun"  # of an index: with how many of its last prompts those of the next shard ran together
_PARTIAL = ".partial"  # a folder for what is being written: libraries have files of their own beside it


@dataclass(frozen=True)
class Entry:
    """One prompt with what was read beside it: of each place, in order, its rows and their positions."""

    id: str
    tokens: list[int]
    prompt_tokens: int
    values: Sequence[torch.Tensor]
    positions: Sequence[Sequence[int] | None]


class Store:
    """Written by one process at a time."""

    def __init__(self, folder: Path, places: Sequence[str], arguments: Mapping[str, Any], shard_bytes: int) -> None:
        """Begins a capture, or goes on with the one that is there.

        Raises ``CaptureError`` if that was made with other arguments, or is being written by another process.
        """
        self._folder = folder
        self._places = list(places)
        self._shard_bytes = shard_bytes
        self._held: list[Entry] = []
        self._held_bytes = 0
        self._again = 0
        self.committed: int = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = locked(folder)
        self._manifest = self._begun(dict(arguments))
        self._tidy()
        indices = sorted(folder.glob("shard-*.parquet"))
        self._shards = len(indices)
        self.committed = sum(_prompts_in(index) for index in indices)
        if indices:
            self._again = int((pq.read_schema(indices[-1]).metadata or {}).get(_BEGUN, 0))

    @property
    def start(self) -> int:
        """The prompt to go on with: the first of the window that the next one belongs to."""
        return self.committed - self._again

    @property
    def complete(self) -> bool:
        return bool(self._manifest["complete"])

    def last(self) -> tuple[str, list[int]] | None:
        """Id and prompt of the last committed prompt."""
        if not self._shards:
            return None
        file = self._folder / f"{_name(self._shards - 1)}.parquet"
        table = pq.read_table(file, columns=["id", "tokens", "prompt_tokens"])
        found = table.slice(len(table) - 1).to_pylist()[0]
        return found["id"], found["tokens"][: found["prompt_tokens"]]

    def add(self, entries: Sequence[Entry]) -> None:
        """The entries of one window, of which those that an earlier run has committed are passed over."""
        for number, entry in enumerate(entries[self._again :], self._again):
            size = sum(value.nbytes for value in entry.values)
            if self._held and self._held_bytes + size > self._shard_bytes:
                self._commit(number)
            self._held.append(entry)
            self._held_bytes += size
        self._again = 0

    def finish(self) -> None:
        """Commits what is left and says in the manifest that nothing is missing."""
        if self._held:
            self._commit()
        self._manifest |= {"complete": True, "prompts": self.committed, "shards": self._shards}
        self._write_manifest()

    def close(self) -> None:
        self._lock.close()

    # -- shards ---------------------------------------------------------------------------

    def _commit(self, begun: int = 0) -> None:
        """``begun``: how many of the last prompts ran together with those that come now."""
        name = _name(self._shards)
        tensors, rows = {}, []
        for number, place in enumerate(self._places):
            values = [entry.values[number] for entry in self._held if entry.values]
            if values:
                _require_alike(place, values)
                tensors[place] = torch.cat(values)
            start = 0
            for offset, entry in enumerate(self._held):
                count = len(entry.values[number]) if entry.values else 0
                rows.append(self._row(self.committed + offset, entry, place, name, start, count, number))
                start += count
        with self._space(name):
            self._replace(f"{name}.safetensors", lambda file: save_file(tensors, file))
            table = pa.Table.from_pylist(rows, schema=INDEX.with_metadata({_BEGUN: str(begun)}))
            self._replace(f"{name}.parquet", lambda file: pq.write_table(table, file, compression="zstd"))
        self._shards += 1
        self.committed += len(self._held)
        self._held, self._held_bytes = [], 0

    @staticmethod
    def _row(number: int, entry: Entry, place: str, shard: str, start: int, count: int, column: int) -> dict[str, Any]:
        positions = entry.positions[column] if entry.values else []
        return {
            "number": number,
            "id": entry.id,
            "place": place,
            "shard": f"{shard}.safetensors",
            "start": start,
            "rows": count,
            "positions": None if positions is None else list(positions),
            "tokens": entry.tokens,
            "prompt_tokens": entry.prompt_tokens,
        }

    def _replace(self, name: str, write: Callable[[Path], Any]) -> None:
        put(self._folder, name, write)

    @contextmanager
    def _space(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not _is_full(error):
                raise
            self._tidy()
            raise CaptureError(
                f"the disk is full: {name} ({self._held_bytes / 2**20:.1f} MiB) could not be written to "
                f"{self._folder}. The {self.committed} prompts before it are safe: make room and run the same capture "
                f"again, which goes on there"
            ) from error

    # -- the manifest ---------------------------------------------------------------------

    def _begun(self, arguments: dict[str, Any]) -> dict[str, Any]:
        path = self._folder / MANIFEST
        if not path.exists():
            others = [file.name for file in self._folder.glob("shard-*")]
            if others:
                raise CaptureError(
                    f"{self._folder} has {others[0]} but no {MANIFEST}: it is not a capture to go on with"
                )
            self._manifest = {"format": 1, "complete": False, "places": self._places, **arguments}
            self._write_manifest()
            return self._manifest
        manifest = json.loads(path.read_text())
        asked = json.loads(json.dumps({"places": self._places, **arguments}))
        differing = [name for name, value in asked.items() if name != "versions" and manifest.get(name) != value]
        if differing:
            first = differing[0]
            raise CaptureError(
                f"{self._folder} holds a capture with {first}={manifest.get(first)!r}, and this one has "
                f"{asked[first]!r}: give another `out`, or remove that folder"
            )
        return manifest

    def _write_manifest(self) -> None:
        text = json.dumps(self._manifest, indent=2) + "\n"
        with self._space(MANIFEST):
            self._replace(MANIFEST, lambda file: file.write_text(text))

    def _tidy(self) -> None:
        shutil.rmtree(self._folder / _PARTIAL, ignore_errors=True)
        for shard in self._folder.glob("shard-*.safetensors"):
            if not shard.with_suffix(".parquet").exists():
                shard.unlink()


def _is_full(error: Exception) -> bool:
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    # The library that writes shards has an exception of its own, with the number in its text.
    return getattr(error, "errno", None) in numbers or any(f"os error {one}" in str(error) for one in numbers)


def _name(number: int) -> str:
    return f"shard-{number:05d}"


def _prompts_in(index: Path) -> int:
    numbers = pq.read_table(index, columns=["number"])["number"]
    return len(numbers.unique())


def _require_alike(place: str, values: Sequence[torch.Tensor]) -> None:
    kinds = {(value.shape[1:], value.dtype) for value in values}
    if len(kinds) > 1:
        shapes = ", ".join(sorted(f"[rows, {', '.join(map(str, shape))}] {dtype}" for shape, dtype in kinds))
        raise CaptureError(f"`{place}` has rows of several kinds, which can't lie in one tensor: {shapes}")


def put(folder: Path, name: str, write: Callable[[Path], Any]) -> None:
    """A file that is there as a whole or not at all, after a loss of power too."""
    scratch = folder / _PARTIAL
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    partial = scratch / name
    write(partial)
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, folder / name)
    scratch.rmdir()
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def locked(folder: Path) -> Any:
    """Holds a folder for this process until what it returns is closed. Raises ``CaptureError`` if another has it."""
    file = open(folder / ".lock", "w")  # noqa: SIM115, held until the store is closed
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise CaptureError(f"another process is writing a capture to {folder}") from error
    return file
