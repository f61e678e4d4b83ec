"""What a block is told that writes something which does not fit where it goes."""

from __future__ import annotations

from typing import Any

import torch

from insitu.block import WriteError


def misfit(what: str, place: Any, new: Any) -> WriteError:
    """``what`` is the name of the place, whose value ``new`` was to replace."""
    way_out = "; one value for all rows is written in place, with `[:] = value`" if _spreads(new, place) else ""
    return WriteError(f"{what} takes {_form(place)}; got {_form(new)}{way_out}")


def _spreads(new: Any, place: Any) -> bool:
    """Whether writing in place would take it, for every row or element."""
    if not isinstance(place, torch.Tensor):
        return False
    if isinstance(new, (bool, int, float)):
        return True
    if not isinstance(new, torch.Tensor) or new.shape == place.shape:
        return False
    try:
        return torch.broadcast_shapes(new.shape, place.shape) == place.shape
    except RuntimeError:
        return False


def _form(value: Any, depth: int = 3) -> str:
    if isinstance(value, torch.Tensor):
        return f"shape {tuple(value.shape)} {value.dtype}"
    if isinstance(value, (tuple, list)):
        shown = [_form(part, depth - 1) for part in value[:4]] if depth else ["..."]
        more = ["..."] if len(value) > 4 and depth else []
        return f"{type(value).__name__} of {len(value)} ({', '.join(shown + more)})"
    if isinstance(value, dict):
        return f"dict with {', '.join(map(str, value))}"
    return f"{type(value).__name__} {value!r}"[:80]
