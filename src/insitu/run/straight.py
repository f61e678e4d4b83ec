"""What a block does, written down once for all requests beside which it does the same.

The block is run with names in place of values, before the forward. What it does with them is noted as steps; what
would depend on values, or leave anything behind outside the block, has no rule and ends the attempt: each request
then runs the block for itself. So nothing that a block may call is ever called here but what this file knows.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Set
from types import CodeType, FrameType
from typing import Any

from insitu.run import refusals
from insitu.run.apart import outcome_of_call, outcome_of_product
from insitu.run.heads import ATTN_PATTERN
from insitu.run.held import Held, NotStraightError, bare
from insitu.run.kinds import ByRows, leaves
from insitu.run.noted import Noted, Program, Ref, mapped
from insitu.run.shown import BUILTINS
from insitu.run.sym import PLAIN_METHODS, Sym, ref_of
from insitu.tree import LOGITS, SAMPLES, Place


class Recording:
    """The session of a block that is written down. ``kind_of``: what a place was seen to hold; ``place_of``: where a
    standard name lies; ``shortest``: tokens of the shortest prompt; ``lengths``: steps that requests are
    certain to have. ``ends``: after so many steps they end; ``over``: whether that is so, or they may end before.
    ``builtins``: of the user's own code."""

    step: int = 0
    builtins: Any = BUILTINS

    def __init__(
        self,
        owner: object,
        kind_of: Callable[[Place], Any],
        place_of: Callable[[str, int | None], Place],
        shortest: int,
        ends: int,
        lengths: Set[int | None],
        over: bool = False,
    ) -> None:
        self.owner = owner
        self.program: Program = Program()
        self.over = over
        self.ends = ends
        self._lengths = lengths
        self._kind_of = kind_of
        self._place_of = place_of
        self._shortest = shortest
        self._at: Place | None = None
        self.copied: Counter[int] = Counter()
        """By number, how often `x[:]` was asked for."""
        self._count = 0
        self._closed = False
        self._kept: list[Sym] = []
        self._parts: dict[tuple[Place | None, int], list[weakref.ref[Sym]]] = {}
        self._columns: dict[Any, list[weakref.ref[Sym]]] = {}
        """What has an axis more, by the memory that it shares."""

    def count(self) -> int:
        self._count += 1
        return self._count

    def let_go(self, number: int) -> None:
        """The block holds the value no more."""
        if not self._closed:
            self.program.frees.setdefault(len(self.program.steps), []).append(number)

    def keep(self, sym: Sym) -> None:
        """A tensor of the caller's is not let go of."""
        self._kept.append(sym)

    def close(self) -> None:
        """The block has ended: what it left is held from here on."""
        self._closed = True

    def refused(self) -> NotStraightError:
        self.program.refused = True
        return NotStraightError()

    def __getattr__(self, name: str) -> Any:
        raise self.refused()

    # -- the session ----------------------------------------------------------------------

    @property
    def seen(self) -> int:
        return self.ends

    @property
    def length(self) -> int | None:
        if len(self._lengths) > 1:
            raise self.refused()
        return next(iter(self._lengths))

    def go_to(self, step: int) -> bool:
        if step < self.step or (step == self.step and self._at is not None):
            raise self.refused()
        self.note("go_to", (step, step < self.ends), None, None)
        self.step, self._at = step, None
        return step < self.ends

    def move_on(self) -> None:
        self.note("move_on", (), None, None)
        self.step, self._at = self.step + 1, None

    def _arrive(self, place: Place) -> None:
        self._at = place
        if self.step >= self.ends:
            raise refusals.ended(place, self.step, self.ends) if self.over else self.refused()

    def read(self, place: Place) -> Any:
        if place.op or not (place.in_forward or place in (LOGITS, SAMPLES)):
            raise self.refused()
        self._arrive(place)
        return self.note("read", (place,), self._kind_of(place), place)

    def write(self, place: Place, value: Any) -> None:
        if place == SAMPLES:
            raise self.refused()
        self._arrive(place)
        self._require_whole(value, self._kind_of(place))
        self.note("write", (place, value), None, place)

    def read_stream(self, name: str, layer: int | None) -> Any:
        kind, place = self._stream_kind(name, layer), self._place_of(name, layer)
        self._arrive(place)
        return self.note("stream", (name, layer), kind, place)

    def write_stream(self, name: str, layer: int | None, value: Any) -> None:
        self._require_whole(value, self._stream_kind(name, layer))
        place = self._place_of(name, layer)
        self._arrive(place)
        if self._parts_at(place, self.step):
            raise self.refused()  # what it is a part of may change
        self.note("write_stream", (name, layer, value), None, place)

    def _stream_kind(self, name: str, layer: int | None) -> ByRows:
        if name == ATTN_PATTERN:
            raise self.refused()
        kinds = leaves(self._kind_of(self._place_of(name, layer)))
        if not kinds:
            raise self.refused()
        return ByRows(3) if name in ("q", "k", "v") else ByRows(2, like=kinds[0] and kinds[0].like)

    def _require_whole(self, value: Any, kind: Any) -> None:
        if not isinstance(value, Sym) or value._kind != kind or value._span is not None:
            raise self.refused()
        if value._captured or value._shaped:
            raise self.refused()
        if self._phase(value._when) != self._phase(self.step):
            raise self.refused()

    def _phase(self, step: int) -> int:
        """Steps in which a request has as many rows have the same one: each but the first is of one token."""
        return min(step, 1)

    def _parts_at(self, place: Place | None, when: int) -> list[Sym]:
        """What the block holds of the memory of what it read there."""
        parts = [part for ref in self._parts.pop((place, when), ()) if (part := ref()) is not None]
        if parts:
            self._parts[place, when] = [weakref.ref(part) for part in parts]
        return parts

    # -- steps ----------------------------------------------------------------------------

    def note(
        self,
        what: str,
        args: tuple[Any, ...],
        kind: Any,
        place: Place | None,
        span: Any = None,
        when: int | None = None,
    ) -> Any:
        if kind is None and what in ("read", "part"):
            raise self.refused()  # never seen, or no tensor that goes by tokens
        if when is None:
            when = args[0]._when if args and isinstance(args[0], Sym) else self.step
        result = None if what in _EFFECTS else Sym(self, kind, place, span, when)
        if what in PLAIN_METHODS or what == "rows":
            if args[0]._captured:
                raise self.refused()
            if what != "clone" and result is not None:
                self._parts.setdefault((place, when), []).append(weakref.ref(result))
        if len(self.program.steps) == MOST:
            raise self.refused()
        if result is not None:
            result._shaped = what in ("apart", "product") or any(
                isinstance(each, Sym) and each._shaped for each in args
            )
        if result is not None:
            self._note_memory(result, what, args)
        if result is not None and what == "read":
            self.program.kinds[result._number] = kind
        named = None if result is None else Ref(result._number)
        self.program.steps.append(Noted(what, mapped(args, Sym, ref_of), named, self._line(sys._getframe(1))))
        return result

    def _line(self, frame: FrameType | None) -> tuple[CodeType, int]:
        """The user's line that the step is on."""
        while frame is not None and frame.f_globals.get("__builtins__") is not self.builtins and frame.f_back:
            frame = frame.f_back
        assert frame is not None
        return frame.f_code, frame.f_lineno

    def _note_memory(self, result: Sym, what: str, args: tuple[Any, ...]) -> None:
        """Whose memory it is a view of when a block runs alone."""
        if what in ("read", "stream", "part"):
            result._memory = result._place, result._when
        elif what == "rows" or (what in PLAIN_METHODS and what != "clone"):
            result._memory = args[0]._memory
        elif what == "apart" and args[1] == "unsqueeze":
            result._memory = args[0]._memory
            self._columns.setdefault(result._memory, []).append(weakref.ref(result))

    def apart(self, name: str, value: Sym, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation on each request's rows by themselves."""
        self._require_dense(value)
        found = (
            outcome_of_product(value._kind, args[0])
            if name == "matmul"
            else outcome_of_call(name, value._kind, value._span is None, args, kwargs)
        )
        if found is None:
            raise self.refused()
        span = value._span if found.by_rows else None
        return self.note("apart", (value, name, args, kwargs, found.kind.each), found.kind, value._place, span)

    def _require_dense(self, value: Sym) -> None:
        """Kernels round another way where rows do not lie side by side, as every second one does alone."""
        if value._captured or (value._span is not None and value._span[2] != 1):
            raise self.refused()

    def product(self, value: Sym, vector: Sym) -> Any:
        """Of each request's rows with a vector of its own."""
        kind = value._kind
        self._require_dense(value)
        if vector._kind != ByRows(1, each=True) or kind.dims < 1:
            raise self.refused()
        made = ByRows(kind.dims - 1, kind.each)
        return self.note("product", (value, vector, kind.each), made, value._place, value._span)

    def edit(self, target: Sym, what: str, value: Any) -> None:
        """``target`` changed in place. Other parts of the same memory would change with it, so there may be none."""
        if not isinstance(target._kind, ByRows) or target._captured:
            raise self.refused()
        parts = self._parts_at(target._place, target._when)
        if any(part is not target or part._base is None for part in parts):
            raise self.refused()
        if any(column() is not None for column in self._columns.pop(target._memory, ())):
            raise self.refused()
        if self.together(target, value) != (target._kind, target._span):
            raise self.refused()
        if target._place == SAMPLES:
            raise self.refused()
        self.note("edit", (target, target._base, target._key, what, bare(value)), target._kind, target._place)

    def fits(self, key: Any, value: Sym) -> bool:
        """Whether it picks rows, and does so of the shortest prompt too."""
        if type(key) is int:
            shortest = 1 if value._place in _ONE_ROW or value._when else self._shortest
            return -shortest <= key < shortest
        if isinstance(key, slice):
            forward = key.step is None or (type(key.step) is int and key.step > 0)
            return forward and all(part is None or type(part) is int for part in (key.start, key.stop))
        return False

    def together(self, left: Any, right: Any) -> tuple[ByRows, Any]:
        """What an operation on the two gives, and its span; refused if it does not do the same to rows packed
        together."""
        kinds = [value._kind for value in (left, right) if isinstance(value, Sym)]
        if not all(isinstance(kind, ByRows) for kind in kinds):
            raise self.refused()
        whole = max(kinds, key=lambda kind: (not kind.each, kind.dims))
        for value in (left, right):
            if isinstance(value, Sym):
                kind = value._kind
                if (kind.each and kind.dims < 1) or (kind != whole and not (kind.each and kind.dims < whole.dims)):
                    raise self.refused()
            elif isinstance(value, Held):
                if value.tensor.dim() > whole.dims - (not whole.each):
                    raise self.refused()
            elif type(value) not in (int, float, bool):
                raise self.refused()
        rows = [value for value in (left, right) if isinstance(value, Sym) and not value._kind.each]
        spans = {(value._span, value._place in _ONE_ROW, self._phase(value._when)) for value in rows}
        if len(spans) > 1:
            raise self.refused()
        return whole, rows[0]._span if rows else None


MOST = 20_000
"""Steps. Alone, a loop without end may end at a place that has gone by."""
_EFFECTS = {"write", "write_stream", "edit", "go_to", "move_on"}
_ONE_ROW = (LOGITS, SAMPLES)
