"""How far a capture has come."""

from __future__ import annotations

from collections.abc import Sequence
from operator import length_hint
from typing import Any

from tqdm.auto import tqdm

from insitu.dataset.store import Entry


class Progress:
    """A bar of prompts with their rate and the time left."""

    def __init__(self, prompts: Any, done: int, shown: bool) -> None:
        self._bar = tqdm(total=length_hint(prompts) or None, initial=done, unit="prompt", disable=not shown)
        self._bytes = 0

    def advance(self, entries: Sequence[Entry]) -> None:
        self._bytes += sum(value.nbytes for entry in entries for value in entry.values)
        self._bar.set_postfix_str(f"{self._bytes / 2**20:.1f} MiB", refresh=False)
        self._bar.update(len(entries))

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.close()
