"""Promises of what a block makes of a promised row, so that it may edit the row by it before either is there."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from insitu.run.affine import Affine, as_row
from insitu.run.expression import Along, Expression, Operand, Row, made_of, product
from insitu.run.promise import NOTHING, Promise, fulfil, promise_in

if TYPE_CHECKING:
    from insitu.run.promised import Target

Shape = tuple[int, ...]


class _Like(NamedTuple):
    shape: Shape
    dtype: torch.dtype
    device: torch.device


class Expressed:
    """What one promise of an expression stands for; ``source`` is what it was made of."""

    __slots__ = ("like", "made", "source", "views")

    def __init__(self, source: Target, made: Expression, shape: Shape) -> None:
        self.source: Target = source
        self.made: Expression = made
        self.like = _Like(shape, made.dtype, source.like.device)
        self.views: list[torch.Tensor] = []

    def part(self, row: torch.Tensor, whole: Promise) -> Promise:
        raise AssertionError("an expression is whole")

    def copied(self) -> None:
        return None

    def vector(self, value: torch.Tensor) -> torch.Tensor:
        return self.source.vector(value)

    def edit(self) -> Affine | None:
        if not isinstance(self.made, Row) or not self.source.is_open:
            return None
        self.made = Row(Affine(self.made.affine), self.made.dtype)  # others may have been made of it
        return self.made.affine

    def keep(self) -> None:
        self.source.keep()

    def expression(self, of: Promise) -> Expression | None:
        return self.source.expression(of)

    def make(self, name: str, args: Any, kwargs: Any) -> Any:
        return self.source.make(name, args, kwargs)

    def give(self, promise: Any, row: torch.Tensor) -> None:
        """Makes the promise an ordinary tensor, of the ``row`` that the model has there."""
        value = row.to(torch.float32, copy=True)
        self.made.affine.apply(value)
        if not isinstance(self.made, Row):
            value *= self.made.vector.to(value)
        if isinstance(self.made, Along):
            value = value.sum(-1) * self.made.times
        fulfil(promise, value)


def make(source: Target, name: str, args: Any, kwargs: Any) -> Any:
    """A promise of what a function gives of promises of one place; ``NotImplemented`` where a table can't give it."""
    rule = _RULES.get(name)
    if rule is None or not source.is_open or (kwargs and rule not in _WITH_SETTINGS):
        return NotImplemented
    try:
        found = rule(_Operands(source), *args, **(kwargs or {}))
    except (TypeError, AttributeError, RuntimeError):  # arguments that only torch knows, or knows to be wrong
        found = None
    if found is None:
        return NotImplemented
    made, shape = found
    if isinstance(made, torch.Tensor):
        return made
    if rule is _unsqueeze or (rule is _item and isinstance(made, Along)):
        with torch._C.DisableTorchFunctionSubclass():
            memory = args[0].view(shape)  # what changes one changes the other
    else:
        memory = torch.empty(shape, dtype=made.dtype, device=source.like.device)
    place = Expressed(source, made, shape)
    return source.note(promise_in(memory, place, NOTHING))


class _Operands:
    """The values of a call, as far as an expression of ``source`` may be made of them."""

    def __init__(self, source: Target) -> None:
        self.source = source
        self.width: int = source.like.shape[-1]

    def expression(self, value: Any) -> Expression | None:
        return self.source.expression(value) if isinstance(value, Promise) else None

    def __call__(self, value: Any) -> Operand:
        if isinstance(value, Promise):
            return self.expression(value)
        found = as_row(value, self.width, self.source.like.device)
        return self.source.vector(found) if isinstance(found, torch.Tensor) else found


Found = tuple[Any, Shape] | None


def _binary(what: str, of: _Operands, left: Any, right: Any) -> Found:
    found = made_of(what, of(left), of(right))
    if found is None:
        return None
    shape = tuple(torch.broadcast_shapes(*(each.shape for each in (left, right) if isinstance(each, torch.Tensor))))
    return (found, shape) if isinstance(found, Along) or shape[-1] == of.width else None


def _subtract_from(of: _Operands, left: Any, right: Any) -> Found:
    return _binary("sub", of, right, left)


def _negate(of: _Operands, value: Any) -> Found:
    found = made_of("neg", of.expression(value))
    return None if found is None else (found, tuple(value.shape))


def _product(of: _Operands, left: Any, right: Any) -> Found:
    if not isinstance(left, Promise):  # of two vectors
        return _product(of, right, left) if isinstance(right, Promise) and left.dim() == right.dim() == 1 else None
    shape, value = tuple(left.shape), of.expression(left)
    if isinstance(right, Promise) or (isinstance(value, Along) and shape[-1:] != (1,)):
        return None
    found = product(value, right, of)
    if found is None:
        return None
    width = of.width if isinstance(value, Along) else 1
    return found, (*shape[:-1], width) if right.dim() == 2 else shape[:-1]


def _outer(of: _Operands, left: Any, right: Any) -> Found:
    if not isinstance(left, Promise) or isinstance(right, Promise) or left.shape != (1,) or right.dim() != 1:
        return None
    found = made_of("mul", of.expression(left), of(right))
    return None if found is None else (found, (1, of.width))


def _sum(of: _Operands, value: Any, dim: Any = None, keepdim: Any = False, dtype: Any = None) -> Found:
    found = made_of("sum", of.expression(value))
    if found is None or dtype is not None or type(dim) is not int or dim not in (-1, value.dim() - 1):
        return None
    return found, (*value.shape[:-1], 1) if keepdim else tuple(value.shape[:-1])


def _unsqueeze(of: _Operands, value: Any, dim: Any) -> Found:
    found = made_of("unsqueeze", of.expression(value))
    fits = type(dim) is int and -value.dim() - 1 <= dim <= value.dim()
    return (found, (1,) * (value.dim() + 1)) if fits and found is not None else None


def _item(of: _Operands, value: Any, index: Any) -> Found:
    made = of.expression(value)
    if isinstance(made, Row) and type(index) is list and index in ([0], [-1]) and value.dim() == 2:
        return made, tuple(value.shape)
    if not isinstance(made, Along):
        return None
    parts = index if type(index) is tuple else (index,)
    new, ones = (sum(type(each) is kind for each in parts) for kind in (type(None), int))
    whole = sum(isinstance(each, slice) and each == slice(None) for each in parts)
    known = new + ones + whole + sum(each is Ellipsis for each in parts) == len(parts)
    if not known or ones + whole > value.dim() or any(type(each) is int and each not in (0, -1) for each in parts):
        return None
    return made, (1,) * (value.dim() + new - ones)


def _as_float(of: _Operands, value: Any) -> Found:
    return _as_other(of, value, torch.float32)


def _as_other(of: _Operands, value: Any, *args: Any, **kwargs: Any) -> Found:
    if not isinstance(value, Promise):
        like = args[0].place.like  # which is all that is asked of it
        return value.to(like.device, like.dtype, *args[1:], **kwargs), tuple(value.shape)
    made = of.expression(value)
    if made is None or "copy" in kwargs or len(args) > 2 or any(isinstance(each, Promise) for each in args):
        return None
    device, dtype, *_ = _parse_to(*args, **kwargs)
    like = of.source.like
    if device not in (None, like.device) or dtype not in (None, value.dtype, torch.float32, like.dtype):
        return None
    same = dtype in (None, value.dtype)
    return (value if same else made._replace(dtype=dtype)), tuple(value.shape)


def _itself(of: _Operands, value: Any) -> Found:
    return value, tuple(value.shape)


def _in_shape(of: _Operands, value: Any, *shape: Any) -> Found:
    sizes = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
    if -1 in sizes and len(sizes) == value.dim():
        sizes[sizes.index(-1)] = value.shape[sizes.index(-1)]
    return (value, tuple(value.shape)) if tuple(sizes) == tuple(value.shape) else None


_parse_to: Any = torch._C._nn._parse_to  # pyright: ignore[reportAttributeAccessIssue]

_RULES: dict[str, Any] = {
    "add": partial(_binary, "add"),
    "sub": partial(_binary, "sub"),
    "__rsub__": _subtract_from,
    "rsub": _subtract_from,
    "mul": partial(_binary, "mul"),
    "div": partial(_binary, "truediv"),
    "neg": _negate,
    "matmul": _product,
    "mv": _product,
    "dot": _product,
    "outer": _outer,
    "sum": _sum,
    "unsqueeze": _unsqueeze,
    "__getitem__": _item,
    "float": _as_float,
    "to": _as_other,
    "type_as": _as_other,
    "detach": _itself,
    "contiguous": _itself,
    "reshape": _in_shape,
    "view": _in_shape,
}
_WITH_SETTINGS = (_sum, _unsqueeze, _as_other)
