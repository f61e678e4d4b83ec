"""A JSON form as it is written down for many requests. What it may use is what it saves; the rest its actions bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from insitu.guard import GuardLimits
from insitu.guard.rehearsal import Around, RestrictedTogether, rehearsed
from insitu.net.form_block import FormBlock, Vectors
from insitu.run.held import Held, NotStraightError
from insitu.run.noted import Program

__all__ = ["RestrictedTogether", "form_rehearsed", "form_written"]

_ANY = 1 << 62


def form_written(form: FormBlock, tracer: Any, device: torch.device) -> dict[str, Any]:
    """What it returns when it is written down."""
    return form.written(tracer, _Held(device))


def form_rehearsed(
    form: FormBlock, program: Program, around: tuple[Any, ...], values: Mapping[int, Any]
) -> Mapping[int, int]:
    """As ``rehearsed``; ``around`` are the fields of its ``Around``."""
    most = _ANY if form.saved_bytes is None else form.saved_bytes
    sizes = {"value_bytes": _ANY, "live_bytes": _ANY, "work": _ANY}
    return rehearsed(program, Around(*around), GuardLimits(seconds=float("inf"), saved_bytes=most, **sizes), values)


class _Held(Vectors):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def width(self, rows: Any) -> int:
        like = rows._kind.like
        if like is None:
            raise NotStraightError
        return math.prod(like[0])

    def beside(self, rows: Any, vector: Any) -> Any:
        return Held(vector.to(self._device))
