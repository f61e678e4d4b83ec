"""The block that runs beside each prompt of a data set: which rows of which places it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from insitu.block import ArgumentError
from insitu.tree import Named

if TYPE_CHECKING:
    from insitu.engine.client.model import VLLM
    from insitu.engine.client.trace import Trace

Apply = Callable[[torch.Tensor], torch.Tensor]
Phase = Literal["prompt", "generated", "all"]
PHASES = ("prompt", "generated", "all")
LOGITS = "logits"


@dataclass(frozen=True)
class Read:
    """What one prompt's block returns: of each place its rows, and the ids that were drawn, if it stayed for them."""

    values: list[torch.Tensor]
    drawn: list[int]


@dataclass(frozen=True)
class Positions:
    """Which of the prompt's rows are kept: a slice of them, or those of a text in it."""

    chosen: slice = field(default_factory=lambda: slice(None))
    text: str = ""

    @classmethod
    def of(cls, given: Any) -> Positions:
        """From what a user gives: ``"all"``, ``"last"``, a position, a slice, ``"3:7"`` or ``"text:Paris"``."""
        if isinstance(given, slice):
            return cls(given)
        if isinstance(given, int) and not isinstance(given, bool):
            return cls(slice(given, given + 1 or None))
        words = {"all": slice(None), "last": slice(-1, None)}
        if isinstance(given, str) and given in words:
            return cls(words[given])
        if isinstance(given, str) and given.startswith("text:") and len(given) > 5:
            return cls(text=given[5:])
        parts = given.split(":") if isinstance(given, str) else []
        if 2 <= len(parts) <= 3 and all(not part or part.lstrip("-").isdigit() for part in parts):
            return cls(slice(*(int(part) if part else None for part in parts)))
        raise ArgumentError(
            f"positions={given!r}: it is 'all', 'last', a number, a slice (or '3:7'), or 'text:' and a piece of the "
            f"prompt"
        )

    def among(self, count: int, found: range | None = None) -> range:
        """The positions of a prompt of ``count`` tokens; ``found``: where the text is."""
        return range(count)[self.chosen] if found is None else found


class Reading:
    """Called with the tracer, in the engine, beside one prompt."""

    def __init__(
        self,
        model: VLLM,
        places: Sequence[Named],
        positions: Positions,
        phase: Phase,
        dtype: torch.dtype | None,
        apply: Apply | None,
    ) -> None:
        self._model = model
        self._places = list(places)
        self._positions = positions
        self._phase = phase
        self._dtype = dtype
        self._apply = apply

    def __call__(self, tracer: Trace) -> Read:
        if self._phase == "prompt":
            return Read(self._finished([[value] for value in self._prompt_rows(tracer)]), [])
        rows: list[list[torch.Tensor]] = [[] for _ in self._places]
        for step in tracer.iter[:] if self._phase == "all" else tracer.iter[1:]:
            values = self._prompt_rows(tracer) if step == 0 else [one.read(self._model) for one in self._places]
            for kept, value in zip(rows, values, strict=True):
                kept.append(value)
        drawn = list(tracer.result.outputs[0].token_ids)
        return Read(self._finished(rows), drawn)

    def _prompt_rows(self, tracer: Trace) -> list[torch.Tensor]:
        text = self._positions.text
        where = tracer.positions_of(text) if text else None
        chosen = self._positions.chosen if where is None else slice(where.start, where.stop)
        values = [one.read(self._model) for one in self._places]
        # Logits are of the last position alone.
        return [
            value if one.stream == LOGITS else value[chosen] for one, value in zip(self._places, values, strict=True)
        ]

    def _finished(self, rows: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """``rows``: of each place, those of each step."""
        return [self._as_asked(torch.cat(each) if len(each) != 1 else each[0]) for each in rows if each]

    def _as_asked(self, value: torch.Tensor) -> torch.Tensor:
        if self._apply is not None:
            value = self._apply(value)
            value = value if value.dim() > 1 else value.reshape(1, -1)
        return value if self._dtype is None else value.to(self._dtype)
