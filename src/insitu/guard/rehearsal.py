"""What a block that was written down is going to use beside one request, told before it runs: its steps are done with
tensors that have no values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from insitu.guard.errors import Exceeded
from insitu.guard.limits import GuardLimits
from insitu.guard.meter import Meter
from insitu.guard.operators import walked
from insitu.guard.runtime import size_of
from insitu.guard.watch import Watch
from insitu.run.anatomy import Anatomy
from insitu.run.derived import Derived
from insitu.run.held import NotStraightError
from insitu.run.kinds import ByRows, Constant, leaves
from insitu.run.noted import Noted, Program, Ref, mapped
from insitu.run.packed import OtherKindError, Packed
from insitu.run.together import Together
from insitu.run.torch_state import BlockState
from insitu.tree import LOGITS, SAMPLES, Place, current

__all__ = ["Around", "RestrictedTogether", "rehearsed"]

_A_SECOND = 10_000_000
"""Elements that a step of torch's reads and makes in a second at the very least, whatever the machine."""
_A_STEP = 1000
"""As many elements as the overhead of a step comes to."""
_A_PRODUCT = 16
"""Multiplications of a matrix product, for each of these elements."""
_PRODUCTS = ("mm", "addmm", "bmm", "mv", "dot")


class Around(NamedTuple):
    """What there is to know of a request: rows of its first step, and after how many steps it ends; and of the model:
    what its places were seen to hold."""

    tokens: int
    ends: int
    anatomy: Anatomy
    kind_of: Callable[[Place], Any]


def rehearsed(
    program: Program, around: Around, limits: GuardLimits, values: Mapping[int, Sequence[torch.Tensor]]
) -> Mapping[int, int]:
    """How large a row is of each value that it reads, by the value's number. Raises ``NotStraightError`` unless it
    is certain that it stays within the limits. ``values``: tensors of the caller's, one for each request."""
    steps = [step._replace(args=mapped(step.args, torch.Tensor, _bare)) for step in program.steps]
    session = _Rehearsal(replace(program, steps=steps, error=None), around, limits, values)
    token = current.set(session)  # type: ignore[arg-type]
    try:
        with BlockState(), session.watch:
            session()
    except (Exception, Exceeded, NotStraightError):  # what it would come to alone is told alone
        raise NotStraightError from None
    finally:
        current.reset(token)
    session.require_little()
    return session.found


class _Rehearsal(Together):
    """Of one request's, and the session that it asks. It has no ``shares`` but counts them."""

    def __init__(self, program: Program, around: Around, limits: GuardLimits, values: Mapping[int, Any]) -> None:
        own = {number: [_bare(each[0])] for number, each in values.items()}
        super().__init__(program, (0,), own, _none, _none, None, self)  # type: ignore[arg-type]
        self.found: dict[int, int] = {}
        self.counts = [around.tokens]
        self.watch = _Sums(Meter(replace(limits, operations=1 << 62, seconds=float("inf"))))
        self._around = around
        self._limits = limits
        self._saved = 0

    def require_little(self) -> None:
        work = self.watch.elements + self.watch.multiplications // _A_PRODUCT + _A_STEP * len(self._program.steps)
        little = work <= self._limits.seconds * _A_SECOND and self.watch.made <= self._limits.live_bytes
        if not little or self._saved > self._limits.saved_bytes:
            raise NotStraightError

    def _done(self, step: Noted) -> Any:
        value = super()._done(step)
        if step.what in ("read", "stream"):
            assert step.result is not None
            self.found[step.result.number] = width_of(value)
        return value

    # -- the session ----------------------------------------------------------------------

    in_step = True
    seen = 0

    def go_to(self, step: int) -> bool:
        self.counts = [1 if step else self._around.tokens]
        return step < self._around.ends

    def move_on(self) -> None:
        self.counts = [1]

    def read(self, place: Place) -> Any:
        rows = 1 if place in (LOGITS, SAMPLES) else self.counts[0]
        return _of_kind(self._around.kind_of(place), rows, torch.int64 if place == SAMPLES else None)

    def read_stream(self, name: str, layer: int | None) -> torch.Tensor:
        stream = self._around.anatomy.stream(name, layer)
        if None in leaves(self._around.kind_of(stream.place)):
            raise NotStraightError  # its parts are told by their order
        return Derived(stream.parts(self.read(stream.place)), name, stream.multiplier).value

    def write(self, place: Place, value: Any) -> None:
        pass

    def write_stream(self, name: str, layer: int | None, value: Any) -> None:
        pass

    # -- what it leaves -------------------------------------------------------------------

    def note(self, number: int) -> None:
        pass

    def send(self, *_: Any) -> None:
        pass

    def leave(self, program: Program, value_of: Callable[[int], Any], members: Any) -> None:
        left = mapped([dict(program.saves), program.returned], Ref, lambda ref: value_of(ref.number))
        left = mapped(left, Packed, lambda each: each.tensor)
        seen = set[int]()
        self._saved = sum(size_of(part, seen) for part in walked(left))


class RestrictedTogether(Together):
    """A restricted block's run for many. It was rehearsed: what each of them uses is less than it may."""

    def __call__(self) -> None:
        session: Any = current.get()
        session.withholds = True
        super().__call__()

    def _done(self, step: Noted) -> Any:
        value = super()._done(step)
        if step.what in ("read", "stream"):
            assert step.result is not None
            if width_of(value) > self.widths[step.result.number]:
                raise OtherKindError("a place's value is larger than it was before: trace again")
        return value


class _Sums(Watch):
    """Adds up what is done. Nothing is freed, so that what is made is more than what is ever held."""

    def __init__(self, meter: Meter) -> None:
        super().__init__(meter)
        self.elements = self.multiplications = self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        given = [part for part in walked([list(args), made]) if isinstance(part, torch.Tensor)]
        self.elements += sum(each.numel() for each in given)
        self.made += sum(part.nbytes for part in walked(made) if isinstance(part, torch.Tensor))
        if func._schema.name.partition("::")[2] in _PRODUCTS:
            self.multiplications += given[-1].numel() * given[-2].shape[0]
        return made

    def _check(self, func: Any, name: str, args: Any, kwargs: Any, given: list[torch.Tensor]) -> None:
        if name != "repeat_interleave":  # of a vector for each request's rows, which takes no memory alone
            super()._check(func, name, args, kwargs, given)


def width_of(value: Any) -> int:
    """Bytes of a row of all its tensors."""
    found: list[torch.Tensor] = []
    mapped(value, Packed, lambda each: found.append(each.tensor))
    return sum(each.nbytes // max(each.shape[0], 1) for each in found)


def _of_kind(kind: Any, rows: int, dtype: torch.dtype | None) -> Any:
    """What was seen to be of this kind, with so many rows."""
    if isinstance(kind, ByRows):
        shape, seen = kind.like or ((), dtype)
        return torch.empty((rows, *shape), dtype=seen, device="meta")
    if type(kind) in (tuple, list):
        return type(kind)(_of_kind(part, rows, dtype) for part in kind)
    if type(kind) is dict:
        return {key: _of_kind(part, rows, dtype) for key, part in kind.items()}
    return kind.value if isinstance(kind, Constant) else None


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """Like it, without values."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _none(*_: Any) -> None:
    return None
