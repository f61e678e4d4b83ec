"""One visit of a tapped place by a block that has not waited for it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from insitu.run.affine import Affine
from insitu.run.expressed import Expressed, make
from insitu.run.expression import Expression, Row
from insitu.run.promise import Promise, fulfil, promise_in, release
from insitu.run.served import Rows, Served
from insitu.run.structure import Structure, tensors_in
from insitu.tree import Place

if TYPE_CHECKING:
    from insitu.run.ahead import Ahead, Coming
    from insitu.run.anatomy import Stream
    from insitu.run.block_run import BlockRun


class Promisable(NamedTuple):
    """What is known of a place before its value is there."""

    place: Place
    structure: Structure
    like: tuple[Like, ...]


class Like(NamedTuple):
    """One of its tensors: the shape of a request's row, and the rest."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Target:
    """What one promise of a visit stands for: the tensor number ``part`` of the place, or a stream of it; or the
    ``copy`` of that number which the block made of one."""

    __slots__ = ("copy", "edits", "in_page", "key", "like", "number", "promise", "stream", "views", "visit")

    def __init__(self, visit: PromisedServed, part: int, stream: Stream | None = None, copy: int = 0) -> None:
        self.visit: Any = visit
        self.copy: int = copy
        self.stream: Stream | None = stream
        self.number: int = part
        self.edits: Any = None
        self.views: list[torch.Tensor] = []
        self.key: tuple[int, bool, int] = (part, stream is not None, copy)
        self.like: Like = visit.known.like[part]
        like = self.like
        memory = visit.ahead.memory(self, visit.coming, like) if visit.run.keeps_promises else None
        self.in_page: bool = memory is not None
        if memory is None:
            visit.register()
            memory = visit.run.spare.pop((visit.what, self.key), None)
        if memory is None:
            memory = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        self.promise: Any = promise_in(memory, self)

    def part(self, row: torch.Tensor, whole: Promise) -> Promise:
        view = promise_in(row, self, whole)
        self.views.append(view)
        return view

    def edit(self) -> Affine | None:
        if self.copy or not self.visit.edit(self):
            return None
        if self.edits is None:
            self.edits = Affine()
        return self.edits

    def copied(self) -> torch.Tensor | None:
        """A promise of the value as it is before all edits."""
        return None if self.copy or self.edits is not None else self.visit.copied(self)

    def vector(self, value: torch.Tensor) -> torch.Tensor:
        return self.visit.ahead.vector(value)

    def keep(self) -> None:
        self.visit.keep()

    @property
    def is_open(self) -> bool:
        """Whether something may be made of it that is known before it is there."""
        visit = self.visit
        return not self.copy and visit is not None and visit.is_open and visit.target in (None, self)

    def expression(self, of: Promise) -> Expression | None:
        place: Any = of.place
        if not self.is_open:
            return None
        if place is self:
            return Row(Affine(self.edits), self.like.dtype)
        return place.made if isinstance(place, Expressed) and place.source is self else None

    def make(self, name: str, args: Any, kwargs: Any) -> Any:
        return make(self, name, args, kwargs)

    def note(self, promise: Promise) -> Promise:
        self.visit.expressed.append(weakref.ref(promise))
        return promise

    def parts_of(self, live: Any) -> list[torch.Tensor]:
        """The tensors of the live value that it is the sum of."""
        return [tensors_in(live).floating[self.number]] if self.stream is None else self.stream.parts(live)

    def value_in(self, live: Any, rows: Rows) -> torch.Tensor:
        first, *others = [part[rows.start : rows.stop] for part in self.parts_of(live)]
        return sum(others, first)

    @property
    def is_held(self) -> bool:
        """Whether the block still holds its promise, or a view of it."""
        return sys.getrefcount(self.promise) > 2 or bool(self.views)

    def release(self) -> None:
        """Makes the promise, and views of it, ordinary tensors."""
        for view in self.views:
            release(view)
        release(self.promise)

    def let_go(self) -> None:
        """Its visit and its promise hold it, too: what nobody needs any more is to be gone at once."""
        self.visit = self.promise = None


class PromisedServed(Served):
    """As ``Served``; what is known of it are its shapes. ``wait`` makes the block wait and gives the real one."""

    __slots__ = (
        "_made", "ahead", "closed", "coming", "expressed", "fulfilled", "kept", "known", "registered", "run", "step",
        "target", "targets", "wait", "waits",
    )  # fmt: skip

    def __init__(
        self,
        run: BlockRun,
        known: Promisable,
        wait: Callable[[PromisedServed], Served],
        ahead: Ahead,
        coming: Coming,
    ) -> None:
        self.run: BlockRun = run
        self.step: int = run.step
        self.what: Place = known.place
        self.known: Promisable = known
        self.wait: Callable[[PromisedServed], Served] = wait
        self.ahead: Ahead = ahead
        self.coming: Coming = coming
        self.waits: bool = False
        self.closed: bool = False
        self.fulfilled: bool = False
        self.registered: bool = False
        self.kept: Served | None = None
        self.targets: list[Target] = []
        self.target: Target | None = None
        self.expressed: list[weakref.ref[Any]] = []
        """What the block has made of the promises."""
        self._made: Any = None
        self._leaves = {}
        self._withheld = {}
        self.edited = False
        self.touched: set[int] = set()
        self.live: Any = None

    # -- the block's side -----------------------------------------------------------------

    @property
    def value(self) -> Any:
        if self.kept is None and self.target is not None and self.target.stream is not None:
            self.keep()
        if self.kept is not None:
            return self.kept.value
        if self.fulfilled:
            raise RuntimeError("a promised value is asked for that has gone by: a fault of insitu's")
        if self._made is None:
            parts = [Target(self, i) for i in range(len(self.known.like))]
            self.targets += parts
            self._made = self.known.structure.filled([target.promise for target in parts], [])
        return self._made

    @value.setter
    def value(self, new: Any) -> None:
        self._made = new

    @property
    def is_made(self) -> bool:
        return self._made is not None or self.kept is not None

    def shared_stream(self, stream: Stream) -> torch.Tensor | None:
        if self.kept is not None:
            return self.kept.shared_stream(stream)
        is_part_edited = self.target is not None and self.target.stream is None
        if stream.multiplier != 1 or stream.count != len(self.known.like) or (stream.count > 1 and is_part_edited):
            self.keep()
            return None
        if stream.count == 1:
            return None
        for target in self.targets:
            if target.stream is stream and not target.copy:
                return target.promise
        target = Target(self, 0, stream)
        self.targets.append(target)
        return target.promise

    def replace(self, value: Any) -> None:
        given, own = tensors_in(value).floating, tensors_in(self.value).floating
        if self.kept is None and all(a is b for a, b in zip(given, own, strict=False)) and len(given) == len(own):
            return
        self.keep()
        assert self.kept is not None
        self.kept.replace(value)

    def register(self) -> None:
        """Has the step look at this visit."""
        if not self.registered:
            self.registered = True
            self.coming.visits.setdefault(self.what, []).append((self.run, self))

    def copied(self, target: Target) -> torch.Tensor | None:
        if self.waits or self.closed or self.target is not None:
            return None
        copy = Target(self, target.number, target.stream, 1 + sum(bool(each.copy) for each in self.targets))
        self.targets.append(copy)
        return copy.promise

    def edit(self, target: Target) -> bool:
        """Whether an edit of this promise can be noted: edits of several depend on each other's order, and one of
        a value that the block has left behind is none of the model's."""
        if self.waits or self.closed or self.target not in (None, target) or any(each.copy for each in self.targets):
            return False
        self.register()
        self.run.edited = True
        self.target = target
        return True

    @property
    def is_open(self) -> bool:
        return not (self.waits or self.closed or self.fulfilled)

    def _held_expressions(self) -> list[Any]:
        found = [each() for each in self.expressed]
        return [each for each in found if isinstance(each, Promise)]

    def leave(self) -> None:
        """The block is about to move on. What it has made of promises, and still holds, can be told no later."""
        if self._held_expressions():
            self.keep()

    def close(self) -> None:
        """The block has moved on. Promises that it does not hold any more need not be kept."""
        self.closed, self._made = True, None
        if self.kept is not None:
            return
        if self.target is not None and self.target.edits is not None:
            self.target.edits = self.run.same_as_before((self.what, self.target.key), self.target.edits)
        held: list[Target] = []
        for target in self.targets:
            if target.in_page:
                held.append(target)
            elif target.is_held:
                self.run.keeps_promises = True
                held.append(target)
            else:
                self.run.spare[self.what, target.key] = release(target.promise)
                target.promise = None
        self.targets = held

    def keep(self) -> None:
        """Waits for the value, and makes of the promises what they promised."""
        if self.kept is not None or self.fulfilled:
            return
        if self.closed:
            self._keep_what_was_left()
            return
        self.run.hold_stream()
        self.waits = True  # from here on this is the block's matter
        self.ahead.promised -= 1
        self.kept = real = self.wait(self)
        floating = tensors_in(real.live).floating
        for target in self.targets:
            for view in target.views:
                release(view)
            if target.stream is None:
                fulfil(target.promise, tensors_in(real.value).floating[target.number])
                if not target.copy:
                    real.take(floating[target.number], target.promise)
            else:
                first, *others = target.stream.parts(real.value)
                fulfil(target.promise, sum(others, first))
        for each in self._held_expressions():
            each.place.give(each, each.place.source.promise)
        if any(target.stream is not None for target in self.targets):
            self.run.show_streams()  # as they are before any edit, so that what is changed from here on is known
        if self.target is not None and self.target.edits is not None:
            self.target.edits.apply(self.target.promise)
        self.targets.clear()
        self.target = None

    def _keep_what_was_left(self) -> None:
        """The block is at a later place, or in a later step: when that is there, so is this."""
        if self.step < self.run.step:
            self.run.until_over(self.step)
        elif isinstance(now := self.run.visited, PromisedServed):
            now.keep()

    # -- the forward's side ---------------------------------------------------------------

    @property
    def affine(self) -> Target | None:
        """What the block has edited, if it has."""
        return self.target if self.target is not None and self.target.edits is not None and not self.waits else None

    @property
    def is_owed(self) -> bool:
        return not self.fulfilled and not self.waits

    def apply(self, live: Any, rows: Rows) -> list[torch.Tensor]:
        """Makes the block's edits in the request's rows of the live value. Returns those of its tensors that they may
        have changed."""
        target = self.affine
        if target is None or target.edits is None:
            return []
        value = target.value_in(live, rows)
        target.edits.apply(value)
        if target.stream is not None:
            first, *others = [part[rows.start : rows.stop] for part in target.stream.parts(live)]
            first.copy_(value)
            for other in others:
                other.zero_()
        return target.parts_of(live)

    def fulfil(self, live: Any, rows: Rows) -> None:
        """Gives promises that the block still holds their values, which are those after its edits."""
        if self.waits:
            return
        self._made, self.fulfilled = None, True
        for target in self.targets:
            if not target.in_page:
                target.release()
                target.promise.copy_(target.value_in(live, rows).reshape(target.promise.shape))
                target.let_go()
        self.targets.clear()
        if self.target is not None:
            self.target.visit = None
