"""Values that the forward has not computed yet, for blocks that only edit them.

A block that adds a vector at a place does not need the value there to say so. It is given a promise
before the forward begins; what it does to that is noted, and made by a table in the graph. What it makes of
it to edit it by is a promise too (``expressed``). Anything but an affine edit makes the block wait for the place
after all, and the promise becomes the value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType
from typing import Any, Protocol

import torch

from insitu.block import LocationError
from insitu.run.affine import Affine, as_row, number
from insitu.run.expression import Expression, Row
from insitu.run.served import map_tensors

_plain: Any = torch._C.DisableTorchFunctionSubclass


class Promise(torch.Tensor):
    """One row, ``[1, width]`` or ``[width]``, whose values are not there yet. In ``place`` is what it stands for."""

    place: Promised
    whole: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        handler = _HANDLERS.get(name)
        if handler is not None and args and type(args[0]) is cls:
            try:
                answer = handler(args[0], *args[1:], **(kwargs or {}))
            except TypeError:  # an argument that only torch knows
                answer = NotImplemented
            if answer is not NotImplemented:
                return answer
        about = func.__self__.__name__ in _ATTRIBUTES if name == "__get__" else name in _ABOUT
        if not about:
            _require_can_wait(func)
            first = next((each for each in args if type(each) is cls), None)
            answer = NotImplemented if first is None else first.place.make(name, args, kwargs)
            if answer is not NotImplemented:
                return answer
            demand((args, kwargs))
        with _plain():
            return func(*args, **(kwargs or {}))


class Promised(Protocol):
    """What a promise stands for: a tensor of a place, a stream, or what a block makes of one."""

    like: Any
    """Of its memory: ``shape``, ``dtype`` and ``device``."""

    def part(self, row: torch.Tensor, whole: Promise) -> Promise:
        """A promise of a view of another."""
        ...

    views: list[torch.Tensor]

    def copied(self) -> torch.Tensor | None:
        """A promise of a copy; None if that can't be."""
        ...

    def vector(self, value: torch.Tensor) -> torch.Tensor:
        """``value`` as it is now, whatever happens to it."""
        ...

    def edit(self) -> Affine | None:
        """Where an edit is to be noted; None if it can't be."""
        ...

    def keep(self) -> None:
        """Makes the block wait for the value; the promise is an ordinary tensor then."""
        ...

    def expression(self, of: Promise) -> Expression | None:
        """What a promise is of the row that the model has here; None if it is of another one."""
        ...

    def make(self, name: str, args: Any, kwargs: Any) -> Any:
        """A promise of what a function gives, or ``NotImplemented``."""
        ...


NOTHING = object()
"""What a promise is a view of that has no views of its own."""


def promise_in(memory: torch.Tensor, place: Promised, whole: Any = None) -> Promise:
    """``memory`` is where the value is going to be."""
    memory.__class__ = Promise
    made: Any = memory
    made.place, made.whole = place, whole
    return made


def fulfil(promise: torch.Tensor, value: torch.Tensor) -> None:
    """From here on it is an ordinary tensor, with this value."""
    release(promise)
    promise.copy_(value.reshape(promise.shape))


def release(promise: torch.Tensor) -> torch.Tensor:
    """The same tensor, a promise no more."""
    promise.__class__ = torch.Tensor
    vars(promise).clear()
    return promise


def demand(value: Any) -> None:
    """Waits for all that was promised in ``value``, for code which may not ask."""
    found: list[Promise] = []
    map_tensors(value, lambda tensor: found.append(tensor) if type(tensor) is Promise else None)
    for promise in found:
        if type(promise) is Promise:  # the one before may have been of the same value
            promise.place.keep()
        if type(promise) is Promise:
            raise RuntimeError("a promised value is asked for that has gone by: a fault of insitu's")


_CAN_WAIT = (
    BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType,
)  # fmt: skip


def _require_can_wait(func: Any) -> None:
    """Operators of ``torch.ops`` and compiled scripts end the process if they are left in another order than they
    were called in, of the block's and of the forward's."""
    if not isinstance(func, _CAN_WAIT):
        raise LocationError(
            f"`{func}` was given a value that the forward has not computed yet, and can't wait for it: give it a copy "
            f"that was (`value.float()`), or call `torch.ops` in the block's own text, which tells insitu to wait"
        )


# -- what can be noted ------------------------------------------------------------------------


def _add(promise: Promise, other: Any, *, alpha: Any = 1) -> Any:
    like = promise.place.like
    value, times = _given(promise, other, like.device), number(alpha)
    if value is None or times is None or (edits := promise.place.edit()) is None:
        return NotImplemented
    if isinstance(value, Row):
        return promise if edits.plus(value.affine, times) else NotImplemented
    edits.add(_kept(value, promise), times)
    return promise


def _subtract(promise: Promise, other: Any, *, alpha: Any = 1) -> Any:
    times = number(alpha)
    return NotImplemented if times is None else _add(promise, other, alpha=-times)


def _multiply(promise: Promise, other: Any) -> Any:
    factor = number(other)
    if not factor:  # of what is not finite, zero times it is not zero
        return NotImplemented
    if (edits := promise.place.edit()) is None:
        return NotImplemented
    edits.multiply(factor)
    return promise


def _divide(promise: Promise, other: Any, **rounding: Any) -> Any:
    divisor = number(other)
    return NotImplemented if not divisor or rounding else _multiply(promise, 1 / divisor)


def _set(promise: Promise, other: Any, *_: Any) -> Any:
    if other is promise:
        return promise
    value = _given(promise, other, None)
    if value is None or (edits := promise.place.edit()) is None:
        return NotImplemented
    if isinstance(value, Row):
        edits.become(value.affine)
    else:
        edits.set(_kept(value, promise))
    return promise


def _given(promise: Promise, other: Any, device: torch.device | None) -> Row | torch.Tensor | float | None:
    """What a row is edited by: what was made of the row itself, one vector, or one number."""
    if isinstance(other, Promise):
        made = promise.place.expression(other)
        return made if isinstance(made, Row) and other.dim() <= promise.dim() else None
    return as_row(other, promise.place.like.shape[-1], device)


def _kept(value: torch.Tensor | float, promise: Promise) -> torch.Tensor | float:
    return promise.place.vector(value) if isinstance(value, torch.Tensor) else value


def _clone(promise: Promise, **settings: Any) -> Any:
    copy = None if settings or promise.whole is not None else promise.place.copied()
    return NotImplemented if copy is None else copy


def _zero(promise: Promise) -> Any:
    return _set(promise, 0.0)


def _get_item(promise: Promise, index: Any) -> Any:
    if type(index) is not list and _is_whole(index, promise.whole):  # by a list it is a copy
        return promise
    if promise.whole is None and type(index) is int and index in (0, -1):
        with _plain():
            row = torch.Tensor.__getitem__(promise, 0)
        return promise.place.part(row, promise)
    return NotImplemented


def _set_item(promise: Promise, index: Any, value: Any) -> Any:
    row = promise.whole is None and type(index) is int and index in (0, -1)
    if not row and not _is_whole(index, promise.whole):
        return NotImplemented
    if isinstance(value, Promise) and value.place is promise.place:
        return None
    return NotImplemented if _set(promise, value) is NotImplemented else None


def _is_whole(index: Any, of: Promise | None) -> bool:
    """Whether it means all of a promise, which is a view ``of`` another or else has one row."""
    if index is Ellipsis or (isinstance(index, slice) and index == slice(None)):
        return True
    if type(index) is list:
        return of is None and index in ([0], [-1])
    return of is None and isinstance(index, slice) and index in (slice(-1, None), slice(0, None), slice(0, 1))


_HANDLERS: Mapping[str, Callable[..., Any]] = {
    "add_": _add,
    "__iadd__": _add,
    "sub_": _subtract,
    "__isub__": _subtract,
    "mul_": _multiply,
    "__imul__": _multiply,
    "div_": _divide,
    "__itruediv__": _divide,
    "copy_": _set,
    "fill_": _set,
    "zero_": _zero,
    "clone": _clone,
    "__getitem__": _get_item,
    "__setitem__": _set_item,
}
_ABOUT = {"zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_empty"}
_ABOUT |= {
    "size",
    "dim",
    "numel",
    "nelement",
    "element_size",
    "is_floating_point",
    "stride",
    "is_contiguous",
    "__len__",
}
_ATTRIBUTES = {
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "requires_grad",
    "_version",
}
