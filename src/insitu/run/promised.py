"""One visit of a tapped place by a block that has not waited for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from insitu.run.affine import Affine
from insitu.run.promise import Promise, fulfil, promise_in, release
from insitu.run.served import Rows, Served
from insitu.run.structure import Structure, tensors_in

if TYPE_CHECKING:
    from insitu.run.anatomy import Stream

Spare = dict[Any, torch.Tensor]


class Target:
    """What one promise of a visit stands for: the tensor number ``part`` of the place, or a stream of it."""

    def __init__(self, visit: PromisedServed, part: int, stream: Stream | None = None) -> None:
        self.visit = visit
        self.stream = stream
        self.number = part
        self.edits = Affine()
        self.views: list[torch.Tensor] = []
        self.key = (part, stream is not None)
        like = visit.copies[part]
        self.width, self.device = like.shape[-1], like.device
        memory = visit.spare.pop(self.key, None)
        if memory is None:
            memory = torch.empty((1, *like.shape[1:]), dtype=like.dtype, device=like.device)
        self.promise = promise_in(memory, self)

    def part(self, row: torch.Tensor, whole: Promise) -> Promise:
        view = promise_in(row, self, whole)
        self.views.append(view)
        return view

    def begin_edit(self) -> bool:
        return self.visit.edit(self)

    def keep(self) -> None:
        self.visit.keep()

    def value_in(self, live: Any, rows: Rows) -> torch.Tensor:
        if self.stream is None:
            return tensors_in(live).floating[self.number][rows.start : rows.stop]
        first, *others = [part[rows.start : rows.stop] for part in self.stream.parts(live)]
        return sum(others, first)

    @property
    def is_held(self) -> bool:
        """Whether the block still holds its promise, or a view of it."""
        return sys.getrefcount(self.promise) > 2 or bool(self.views)


class PromisedServed(Served):
    """As ``Served``; what is known of it are its shapes. ``wait`` makes the block wait and gives the real one."""

    __slots__ = ("_made", "copies", "kept", "rows", "spare", "structure", "target", "targets", "wait", "waits")

    def __init__(
        self,
        what: Any,
        structure: Structure,
        copies: list[torch.Tensor],
        spare: Spare,
        wait: Callable[[PromisedServed], Served],
    ) -> None:
        self.what = what
        self.structure = structure
        self.copies = copies
        self.spare = spare
        self.wait = wait
        self.waits = False
        self.kept: Served | None = None
        self.targets: list[Target] = []
        self.target: Target | None = None
        self._made: Any = None
        self._leaves = {}
        self._withheld = {}
        self.edited = False
        self.touched = set()
        self.live = None

    # -- the block's side -----------------------------------------------------------------

    @property
    def value(self) -> Any:
        if self.kept is not None:
            return self.kept.value
        if self._made is None:
            parts = [Target(self, i) for i in range(len(self.copies))]
            self.targets += parts
            self._made = self.structure.filled([target.promise for target in parts], [])
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
        if stream.multiplier != 1 or stream.count != len(self.copies):
            self.keep()
            return None
        if stream.count == 1:
            return None
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

    def edit(self, target: Target) -> bool:
        """Whether an edit of this promise can be noted: edits of several depend on each other's order."""
        if self.waits or self.target not in (None, target):
            return False
        self.target = target
        return True

    def keep(self) -> None:
        """Waits for the value, and makes of the promises what they promised."""
        if self.kept is not None:
            return
        self.waits = True  # from here on this is the block's matter
        self.kept = real = self.wait(self)
        floating = tensors_in(real.live).floating
        for target in self.targets:
            for view in target.views:
                release(view)
            if target.stream is None:
                fulfil(target.promise, tensors_in(real.value).floating[target.number])
                real.take(floating[target.number], target.promise)
            else:
                first, *others = target.stream.parts(real.value)
                fulfil(target.promise, sum(others, first))
        if self.target is not None:
            self.target.edits.apply(self.target.promise)
        self.targets.clear()
        self.target = None

    # -- the forward's side ---------------------------------------------------------------

    @property
    def affine(self) -> Target | None:
        """What the block has edited, if it has."""
        return self.target if self.target is not None and self.target.edits.changed and not self.waits else None

    def apply(self, live: Any, rows: Rows) -> None:
        """Makes the block's edits in the request's rows of the live value."""
        target = self.affine
        if target is None:
            return
        value = target.value_in(live, rows)
        target.edits.apply(value)
        if target.stream is not None:
            first, *others = [part[rows.start : rows.stop] for part in target.stream.parts(live)]
            first.copy_(value)
            for other in others:
                other.zero_()

    def fulfil(self, live: Any, rows: Rows) -> None:
        """Gives promises that the block still holds their values, which are those after its edits."""
        if self.waits:
            return
        self._made = None
        for target in self.targets:
            if target.is_held:
                for view in target.views:
                    release(view)
                fulfil(target.promise, target.value_in(live, rows))
            else:
                self.spare[target.key] = release(target.promise)
            del target.promise, target.visit  # or they would hold each other
        self.targets.clear()
