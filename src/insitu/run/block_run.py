"""One block running beside one request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from insitu.block import OutOfOrderError
from insitu.block.saves import hint_at_save
from insitu.run import traps
from insitu.run.affine import Affine
from insitu.run.beside import Many, Model
from insitu.run.cache import Cache
from insitu.run.carriers import OVER, carrier
from insitu.run.derived import Derived
from insitu.run.heads import ATTN_PATTERN, KeyRecorder, Pattern, not_recorded, not_writable, reads_later_patterns
from insitu.run.mentions import BEHIND_TORCH, UNASKED, code_of, mentions, text_of
from insitu.run.order import TAIL
from insitu.run.promise import demand
from insitu.run.promised import PromisedServed
from insitu.run.recorder import CacheRecorder, Recorder
from insitu.run.served import Rows, Served
from insitu.run.snapshot import SharedServed, Snapshot
from insitu.run.spent import timed
from insitu.run.stream import Stream
from insitu.run.torch_state import TorchState
from insitu.tree import STEP, Listing, Place, current


class BlockRun:
    """A block as a coroutine: it runs until it reads a place, and waits there.

    The side of the forward calls ``start``, ``show`` and ``throw``; each returns when the block
    waits again (``waiting`` says where) or has ended (``done``). The block's own side is the
    ``Session`` of its nodes and tracer.
    """

    def __init__(self, program: Callable[[], Any], model: Model, length: int | None = None) -> None:
        self.length = length
        self.owner: object = None
        self.adapter: Any = None
        self.request = ""
        """Names it among all runs."""
        self.order = 0
        """Its place among the runs beside the same request, which share their rows."""
        self.beside: list[BlockRun] = []
        self.rows = 1
        """How many rows it has in this step."""
        self.many: Many | None = None
        """The requests of a run that is one for many."""
        self._program = program
        self._model = model
        self._state = TorchState()
        self._greenlet: greenlet | None = None
        self._served: Served | None = None
        self._derived: dict[str, Derived] = {}
        self._older: list[Derived] = []
        self._patterns: list[tuple[str, torch.Tensor, int]] = []
        self.withholds = False
        """Whether the block is not to see tensors that may hold what is other requests'."""
        self.room: int | None = None
        """How many bytes its caches may hold; None is as many as there are."""
        self.prompt: Sequence[int] | None = None
        self.drawn: list[tuple[torch.Tensor, int]] = []
        self.at: Place | None = None
        self.waiting: Place | None = None
        self.position: int = 0
        self.habits: Any = None
        self.promise: Callable[[BlockRun, Place], Served | None] | None = None
        """Gives what the block goes on with, without waiting, where that can be."""
        self.spare: dict[Any, Any] = {}
        self.last_edits: dict[Any, Affine] = {}
        self._quick: dict[tuple[str, int | None], tuple[Stream, int]] = {}
        self._quickly: torch.Tensor | None = None
        self._quick_name: tuple[str, int | None] = ("", None)
        self.keeps_promises = False
        """Whether it was seen to hold what it was promised when it moved on."""
        self.last_promised = -1
        self.limit: int = 0
        """The last step that the block may go on to without waiting for it."""
        self.wake: int = 0
        """If it waits for the beginning of a step, which one."""
        text = text_of(program)
        self.code: object = code_of(program, text)
        mentioned = mentions(text)
        self.names_source: bool = "source" in mentioned
        self.reads_unseen: bool = not UNASKED.isdisjoint(mentioned)
        self.reads_tokens: bool = "tokens" in mentioned
        self.writes_unseen: bool = not BEHIND_TORCH.isdisjoint(mentioned)
        self._keys = KeyRecorder(model.anatomy.keys) if reads_later_patterns(mentioned, length) else None
        self.recorders: list[Recorder] = [] if self._keys is None else [self._keys]
        self.skipping: bool = False
        self._skipped: list[tuple[int, Place]] = []
        self.steps = 0
        self.step: int = 0
        self.stopping: bool = False
        self.edited = False
        self.started: bool = False
        self.done: bool = False
        self.returned: Any = None
        self.error: BaseException | None = None

    # -- the forward's side ---------------------------------------------------------------

    def start(self) -> None:
        self.started = True
        self._greenlet = carrier()
        self._state.run(self._into, self._greenlet.switch, self._main)

    def show(self, live: Any, rows: Rows, what: object, fixed: frozenset[int] = frozenset()) -> Served:
        """Lets the block go on with its rows of ``live``; returns what it then leaves behind."""
        return self._state.run(self._show, live, rows, what, fixed)

    def hand(self, served: Served) -> None:
        """As ``show``, of what is already as the block is to see it."""
        assert self._greenlet is not None
        self._state.run(self._into, self._greenlet.switch, served)

    def throw(self, error: BaseException) -> None:
        """Raises ``error`` where the block waits; a block that has not begun just ends with it."""
        if self.done:
            return
        if self._greenlet is None:
            self.done, self.error = True, error
            return
        self._state.run(self._into, self._greenlet.throw, error)

    def refuse(self, error: BaseException) -> None:
        """Raises ``error`` over what the block has just written; one that has ended since fails with it."""
        if self.done:
            self.error = error if self.error is None else self.error
        else:
            self.throw(error)

    def kill(self) -> None:
        """Ends the block, its ``finally`` clauses run, without an error of its own."""
        self.throw(GreenletExit())
        self.done, self.waiting, self._greenlet = True, None, None

    def let_go(self) -> None:
        """What the block left is taken; whoever still holds the run holds no values."""
        self._program, self.returned, self._served, self.spare = _nothing, None, None, {}

    def _show(self, live: Any, rows: Rows, what: object, fixed: frozenset[int]) -> Served:
        assert self._greenlet is not None
        if self.many is not None:  # all of whose rows are not copied unless they have to be
            served: Served = SharedServed(Snapshot(live, [rows]), 0, what, fixed, self.withholds)
        else:
            served = Served(live, rows, what, fixed, self.writes_unseen, self.withholds)
        self._into(self._greenlet.switch, served)
        return served

    def _into(self, switch: Callable[..., Any], *value: Any) -> None:
        assert self._greenlet is not None
        self.waiting = None
        # The forward may reach the next place in another greenlet than the last one.
        self._greenlet.parent = getcurrent()
        place = timed(switch, *value)
        if place is OVER:
            self._greenlet.gr_context = None  # which holds this run
            self.done, self._greenlet, self._served = True, None, None
            self.recorders = [each for each in self.recorders if each is not self._keys]
        else:
            self.waiting = place

    @property
    def in_step(self) -> bool:
        """Whether the block reads the step that the forward is in, and not a later one."""
        return self.step == self.steps - 1

    @property
    def visited(self) -> Served | None:
        """What the block was served last, until it moves on."""
        return self._served

    @property
    def skipped(self) -> list[Place]:
        """What it, or a block beside the same request, has skipped in this step, by its output."""
        return [place for run in (self, *self.beside) for step, place in run._skipped if step == self.step]

    @property
    def seen(self) -> int:
        return self.steps

    # -- the block's side -----------------------------------------------------------------

    def _main(self) -> bool:
        current.set(self)
        try:
            try:
                self.returned = self._program()
                self._leave()
            except Exception as error:
                hint_at_save(error)
                self.error = error
            self._await_own_step()
        except GreenletExit:
            return False
        except BaseException as error:
            self.error = self.error or error
        return not self.done  # else it was killed, and took no notice

    def _await_own_step(self) -> None:
        """What a block does to its request is done when that has come as far as the block, which may be ahead."""
        if self.last_promised >= self.steps:
            self._await(self.last_promised)

    def _await(self, step: int) -> bool:
        self.wake = step
        return traps.wait(STEP).value

    def until_over(self, step: int) -> None:
        """Waits until the values of ``step``, which the block has left behind, are there."""
        self._await(step + 1)

    def read(self, place: Place) -> Any:
        served = self._arrive(place)
        if self._quickly is not None:
            demand(self._quickly)  # it and its parts would each be edited by themselves
        self.show_streams()
        return (self._served or served).value

    def show_streams(self) -> None:
        """What was edited of streams is in their parts from here on."""
        for derived in (*self._older, *self._derived.values()):
            derived.show()

    def write(self, place: Place, value: Any) -> None:
        served = self._arrive(place)
        self._settle()
        served.replace(value)

    def skip(self, place: Place, value: Any) -> None:
        self._arrive(place.at("input"))
        self.skipping = True
        try:
            served = self._arrive(place)
        finally:
            self.skipping = False
        served.replace(value)
        self._skipped.append((self.step, place))

    def operations(self, path: str, op: str) -> Listing:
        return self._model.operations(path, op)

    def go_to(self, step: int) -> bool:
        if step < self.step or (step == self.step and self.at is not None):
            raise OutOfOrderError(f"step {step} has gone by: the block is in step {self.step}")
        self._leave()
        self.step, self.at, self.position, self._served = step, None, 0, None
        return self.in_step or step <= self.limit or self._await(step)

    def move_on(self) -> None:
        self._leave()
        self.step, self.at, self.position, self._served = self.step + 1, None, 0, None

    def stop(self) -> None:
        self._await_own_step()
        self.stopping, self.limit = True, self.step

    def call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        demand((args, kwargs))
        return self._model.call(path, args, kwargs)

    def drawn_ids(self) -> list[int]:
        if not self.in_step:
            self._await(self.step)  # the step that the block is in begins when the one before has drawn its token
        return [int(ids[row]) for ids, row in self.drawn]

    def cache(self, modules: Any, **settings: Any) -> Cache:
        shown = {"withhold": self.withholds, "room": self.room}
        recorder = CacheRecorder(self._model.modules, modules, first_step=self.step, **shown, **settings)
        self._model.record(self, recorder)
        return recorder.cache

    def unembed(self, hidden: torch.Tensor) -> torch.Tensor:
        demand(hidden)
        return self._model.unembed(hidden)

    def apply_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        demand(hidden)
        normed = self._model.call(self._model.anatomy.norm, (hidden,), {})
        # Norms that carry the residual along return it beside.
        return normed[0] if isinstance(normed, tuple) else normed

    def read_stream(self, name: str, layer: int | None) -> torch.Tensor:
        if self.promise is not None and (promise := self._promised_stream(name, layer)) is not None:
            return promise
        return self._pattern(layer) if name == ATTN_PATTERN else self._stream(name, layer).value

    def _promised_stream(self, name: str, layer: int | None) -> torch.Tensor | None:
        """The first reading of a place by a stream that was read so before, the short way."""
        known = self._quick.get((name, layer))
        if known is None or self._skipped or known[1] <= self.position or self.at in TAIL:
            return None
        stream, position = known
        self._leave()
        self._served = None
        served = self.promise(self, stream.place) if self.promise is not None else None
        if served is None:
            return None
        self._served, self.at, self.position = served, stream.place, position
        self._quickly, self._quick_name = served.shared_stream(stream), (name, layer)
        return self._quickly

    def hold_stream(self) -> None:
        """What was read the short way is going to be an ordinary tensor, whose edits are to be noticed."""
        if self._quickly is not None:
            self._stream(*self._quick_name)

    def write_stream(self, name: str, layer: int | None, value: Any) -> None:
        if value is self._quickly and value is not None:
            return  # the stream itself, edited in place
        if name == ATTN_PATTERN:
            raise not_writable(f"`model.{name}[{layer}]`")
        self._stream(name, layer).replace(value)

    def _pattern(self, layer: int | None) -> torch.Tensor:
        stream = self._model.anatomy.stream(ATTN_PATTERN, layer)
        assert isinstance(stream, Pattern)
        if self.step and self._keys is None:
            raise not_recorded(stream.what, self.step)
        served = self._arrive(stream.place)
        earlier = self._keys.before(stream.place, self.step, stream.what) if self.step and self._keys else None
        pattern = stream.compute(served.value, earlier)
        self._patterns.append((stream.what, pattern, pattern._version))
        return pattern

    def _stream(self, name: str, layer: int | None) -> Derived:
        stream = self._model.anatomy.stream(name, layer)
        served = self._arrive(stream.place)
        if name in self._derived and served.is_made and self._derived[name].stale:
            self._older.append(self._derived.pop(name))
            self._older[-1].show()
        if name not in self._derived:
            if isinstance(served, PromisedServed) and stream.count > 1 and self.position:
                self._quick[name, layer] = (stream, self.position)
            index = "" if layer is None else f"[{layer}]"
            known = served.shared_stream(stream)
            self._derived[name] = Derived(
                lambda: stream.parts(served.value), f"model.{name}{index}", stream.multiplier, known
            )
        return self._derived[name]

    def _settle(self) -> None:
        self._quickly = None
        if not self._older and not self._derived and not self._patterns:
            return
        for derived in (*self._older, *self._derived.values()):
            derived.settle()
        self._older.clear()
        self._derived.clear()
        patterns, self._patterns = self._patterns, []
        for what, pattern, version in patterns:
            if pattern._version != version:
                raise not_writable(what)

    def _leave(self) -> None:
        if isinstance(self._served, PromisedServed):
            self._served.leave()
        self._settle()
        if isinstance(self._served, PromisedServed):
            self._served.close()

    def same_as_before(self, key: Any, edits: Affine) -> Affine:
        """The edits of the step before, where these are the same, so that a table which has them is known to."""
        before = self.last_edits.get(key)
        if before is not None and before.is_like(edits):
            return before
        self.last_edits[key] = edits
        return edits

    def _arrive(self, place: Place) -> Served:
        served = self._served
        if place != self.at or served is None:
            self._leave()
            self._model.check(self, place)
            self._served = None
            served = self.promise(self, place) if self.promise is not None else None
            served = self._served = served or traps.wait(place)
            self.at, self.position = place, self._model.position(place, self.position)
        return served


def in_order(runs: Iterable[BlockRun]) -> list[BlockRun]:
    """Those beside one request in their order; requests do not depend on each other's."""
    found = list(runs)
    return sorted(found, key=lambda run: run.order) if any(run.beside for run in found) else found


def _nothing() -> None:
    return None
