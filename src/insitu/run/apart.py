"""Operations that are done to each request's rows by themselves: to rows packed together they would round otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from insitu.run.kinds import ByRows, is_plain

_SUMS = {"mean": ("dim", "keepdim"), "sum": ("dim", "keepdim"), "norm": ("p", "dim", "keepdim")}
_PICKS = {
    "argmax": ("dim", "keepdim"),
    "argmin": ("dim", "keepdim"),
    "amax": ("dim", "keepdim"),
    "amin": ("dim", "keepdim"),
}
_ROWS = {"softmax": ("dim",), "log_softmax": ("dim",)}
_EACH = dict.fromkeys(
    ("abs", "exp", "log", "relu", "rsqrt", "sigmoid", "sqrt", "square", "tanh", "double", "half", "bfloat16"), ()
)
METHODS: Mapping[str, tuple[str, ...]] = {**_SUMS, **_PICKS, **_ROWS, **_EACH, "unsqueeze": ("dim",)}
"""Methods of tensors, with the names of their arguments in order. None changes what it is called on."""


class Applied(NamedTuple):
    """What a call gives: its kind, and whether it has the rows of what it was called on."""

    kind: ByRows
    by_rows: bool


def outcome_of_call(
    name: str, kind: ByRows, is_whole: bool, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Applied | None:
    """None if the call is of no known form. ``is_whole``: it is called on all of the request's rows, which are one or
    more. Axes are counted as a request sees them, whose first is that of its rows unless there is one ``each``."""
    order = METHODS[name]
    given = {**dict(zip(order, args, strict=False)), **kwargs}
    if type(given.get("p")) is str:
        return None  # "nuc" depends on how the memory lies
    if len(args) > len(order) or not given.keys() <= {*order, "dtype"} or not all(map(is_plain, given.values())):
        return None
    rows = not kind.each
    if name in _EACH:
        return None if given else Applied(kind, rows)
    dim = given.get("dim")
    if name == "unsqueeze":
        return Applied(ByRows(kind.dims + 1, kind.each), rows) if dim in (-1, kind.dims) and type(dim) is int else None
    if dim is not None and (type(dim) is not int or not -kind.dims <= dim < kind.dims):
        return None
    if name in _ROWS:
        return None if dim is None else Applied(kind, rows)
    if dim is None:
        return None if given.get("keepdim") or not (is_whole or name in _SUMS) else Applied(ByRows(0, True), False)
    keeps = bool(given.get("keepdim"))
    if rows and dim % kind.dims == 0:  # over the rows themselves
        return None if keeps or not (is_whole or name in _SUMS) else Applied(ByRows(kind.dims - 1, True), False)
    return Applied(ByRows(kind.dims - (not keeps), kind.each), rows)


def outcome_of_product(kind: ByRows, other: torch.Tensor) -> Applied | None:
    """Of ``x @ other``, where ``other`` is the same for all requests."""
    if kind.dims < 1 or other.dim() not in (1, 2):
        return None
    dims = kind.dims - (other.dim() == 1)
    return Applied(ByRows(dims, kind.each), not kind.each) if dims or kind.each else None


def applied(name: str, rows: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The operation, on what is one request's."""
    return rows @ args[0] if name == "matmul" else getattr(rows, name)(*args, **kwargs)
