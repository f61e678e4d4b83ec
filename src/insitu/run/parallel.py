"""Blocks beside a model that lies over several ranks.

Rank 0 leads: blocks run there and nowhere else, on whole tensors. The others follow: at each place where a
block waits they take part in making its value whole, do what the leader's block asks for (calls of
modules), and take over what it has changed. So a block may be as random as it likes, is reported once, and an
error in it is met by no collective that somebody else still waits in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from insitu.block import LocationError, RequestError
from insitu.run.block_run import BlockRun
from insitu.run.followed import News
from insitu.run.interleaver import Interleaver, RowsOf
from insitu.run.layouts import Gathered, Layouts, Parallel
from insitu.run.parked import Parked, Telling, Told
from insitu.run.served import map_tensors, tensors_of
from insitu.run.shards import Group
from insitu.tree import SAMPLES, Place, current


@dataclass
class Done:
    """The leader's blocks all wait again, or have ended."""

    parked: Parked = field(default_factory=dict)
    withdrawn: list[str] = field(default_factory=list)
    recorded: frozenset[Place] | None = None
    """Places that are recorded from now on, if that has changed."""
    in_place: list[int] = field(default_factory=list)
    """Tensors of the place that were edited where they are; each follows."""
    replaced: list[int] = field(default_factory=list)
    left: Sequence[str] = ()
    """Requests whose blocks have all ended: later steps are no concern of theirs."""
    together: News = field(default_factory=dict)
    """Runs that each stand for many, if that has changed."""
    at_taps: Any = None
    """What else there is to know where places have taps."""


@dataclass(frozen=True)
class Command:
    """Something that all ranks are to compute: a module applied to values, or the unembedding."""

    path: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    adapter: Any = None


class ParallelInterleaver(Interleaver):
    """What leading and following have in common."""

    _recorded_places: frozenset[Place] = frozenset()
    _rewritten: frozenset[Place] = frozenset()
    """Where what blocks have written is written once more."""

    def __init__(
        self,
        root: torch.nn.Module,
        unembed: Callable[[torch.Tensor], torch.Tensor],
        safe_ids: int,
        group: Group,
        parallel: Callable[[torch.nn.Module], Parallel | None],
        width: int,
        **about_taps: Any,
    ) -> None:
        super().__init__(root, unembed, safe_ids, **about_taps)
        self._group = group
        self._layouts = Layouts(self.modules, parallel, group, width)
        self.calls.apply = self._layouts.call

    def open(self, rows: RowsOf) -> None:
        super().open(rows)
        self._layouts.restart()
        for path in self._layouts.parallel:
            self._wrap(path)

    def _pass(self, path: str, op: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        value = super()._pass(path, op, function, args, kwargs)
        if not op:
            self._layouts.passed(path)
        return value

    def _is_awaited(self, place: Place) -> bool:
        return place in self._waiting or place in self._recorded_places or place in self._rewritten

    def _gathered(self, place: Place, live: Any) -> Gathered | LocationError:
        try:
            return self._layouts.gather(place, live)
        except LocationError as error:
            return error

    def _taken_over(self, gathered: Gathered, done: Done, replaced: dict[int, torch.Tensor]) -> Any:
        """What the model goes on with on this rank, once all have the edited tensors whole."""
        changed: dict[int, torch.Tensor] = {}
        for index, (live, layout) in enumerate(zip(gathered.tensors, gathered.layouts, strict=True)):
            if index in done.in_place and (layout is not None or self._group.rank):
                whole = gathered.wholes[index]
                live.copy_(layout.part(whole, self._group) if layout is not None else whole)
            if index in replaced:
                new = replaced[index]
                changed[id(live)] = layout.part(new, self._group) if layout is not None else new
        return map_tensors(gathered.live, lambda tensor: changed.get(id(tensor), tensor)) if changed else gathered.live


class Leader(Telling, ParallelInterleaver):
    """Runs the blocks, on rank 0."""

    leaves_ended_out = False  # before followers know, who would wait for messages
    _windows = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._news = Done()

    @contextmanager
    def window(self) -> Iterator[Done]:
        """While it is open the others do what blocks ask for; at its end they are told where blocks wait."""
        self._windows += 1
        try:
            yield self._news
        finally:
            self._windows -= 1
            if not self._windows:
                news, self._news = self._news, Done()
                recorded = self._recorded_now()
                if recorded != self._recorded_places:
                    self._recorded_places = news.recorded = recorded
                self._group.send(news)

    def begin(self, runs: Iterable[BlockRun]) -> bool:
        with self.window() as news:
            news.left, news.together = self.left, self.together
            return super().begin(runs)

    def _serve_if_awaited(self, place: Place, live: Any) -> Any:
        if not self._is_awaited(place):
            return super()._serve_if_awaited(place, live)
        gathered = self._gathered(place, live)
        if isinstance(gathered, LocationError):
            with self.window():
                self._refuse_at(place, gathered)
            return live
        replaced: dict[int, torch.Tensor] = {}
        with self.window() as news:
            value = super()._serve_if_awaited(place, gathered.value)
            news.in_place = sorted(self.touched)
            pairs = zip(tensors_of(gathered.value), tensors_of(value), strict=True)
            by_id = {id(before): after for before, after in pairs if after is not before}
            replaced = {i: by_id[id(each)] for i, each in enumerate(gathered.wholes) if id(each) in by_id}
            news.replaced = sorted(replaced)
        for index in news.in_place:
            self._group.broadcast(gathered.wholes[index])
        for index in news.replaced:
            self._group.broadcast(replaced[index])
        return self._taken_over(gathered, news, replaced)

    def _serve_samples(self, flat: torch.Tensor) -> None:
        if SAMPLES not in self._waiting:
            return
        with self.window():
            super()._serve_samples(flat)
        drawn = flat.contiguous()
        self._group.broadcast(drawn)

    def _refuse_unreached(self) -> None:
        if any(place.in_forward for place in self._waiting):
            with self.window():
                super()._refuse_unreached()

    def _refuse_inside(self, call: Place, error: LocationError) -> None:
        if any(each.path == call.path and each.is_inside(call) for each in self._waiting):
            with self.window():
                super()._refuse_inside(call, error)

    def _refuse_at(self, place: Place, error: LocationError) -> None:
        for run in self._arrived(place):
            run.throw(error)
            self._park(run)

    def call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._ask(path, args, kwargs)
        return super().call(path, args, kwargs)

    def unembed(self, hidden: torch.Tensor) -> torch.Tensor:
        self._ask(None, (hidden,), {})
        return super().unembed(hidden)

    def _ask(self, path: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._windows:
            raise RequestError("the request has ended: modules can't be applied to values any more")
        args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.detach().cpu())
        self._group.send(Command(path, args, kwargs, getattr(current.get(), "adapter", None)))

    def _recorded_now(self) -> frozenset[Place]:
        recorders = [recorder for run, recorder in self._recorders if run.steps > recorder.first_step]
        return frozenset(place for recorder in recorders for place in recorder.places)


class Shadow:
    """A run as a rank that follows knows it."""

    beside: tuple[()] = ()

    def __init__(self, request: str) -> None:
        self.request = request
        self.skipping = False
        self.names_source = False

    def refuse(self, error: BaseException) -> None:
        """Is the leader's business."""


class Follower(Told, ParallelInterleaver):
    """Does on the other ranks what rank 0 does."""

    shadow = Shadow
    left: Sequence[str] = ()
    ended: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    """Is the leader's business."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._device = next(self.modules.root.parameters()).device
        self._shadows: dict[str, Any] = {}

    def begin(self, runs: Iterable[Any]) -> bool:
        self._waiting.clear()
        self._shadows = {run.request: run for run in runs}
        self.left = self.follow().left
        return bool(self._recorded_places) or any(place.in_forward for place in self._waiting)

    def open(self, rows: RowsOf) -> None:
        super().open(rows)
        for place in self._recorded_places:
            self._wrap(place.path)

    def follow(self) -> Done:
        """Does what the leader's blocks ask for, until they all wait again."""
        while True:
            message = self._group.receive()
            if isinstance(message, Done):
                self._take(message)
                return message
            with suppress(Exception):  # the leader meets it too, and its block is told
                self._do(message)

    def _do(self, command: Command) -> None:
        args, kwargs = map_tensors((command.args, command.kwargs), lambda tensor: tensor.to(self._device))
        token = current.set(command)  # type: ignore[arg-type]  # for its adapter
        try:
            if command.path is None:
                self.unembed(*args)
            else:
                self.call(command.path, args, kwargs)
        finally:
            current.reset(token)

    def _take(self, done: Done) -> None:
        if done.together:
            self.company.tell(done.together)
            self._shadows.update(self.company.shadows)
        self._drop_withdrawn(done.withdrawn)
        if done.recorded is not None:
            self._recorded_places = done.recorded
            for place in done.recorded if self._open else ():
                self._wrap(place.path)
        self._wait(done.parked)

    def _serve_if_awaited(self, place: Place, live: Any) -> Any:
        if not self._is_awaited(place):
            return super()._serve_if_awaited(place, live)
        gathered = self._gathered(place, live)
        self._arrived(place)
        done = self.follow()
        if isinstance(gathered, LocationError):
            return live
        for index in done.in_place:
            gathered.wholes[index] = self._received(gathered.wholes[index])
        replaced = {index: self._received(gathered.wholes[index]) for index in done.replaced}
        return self._taken_over(gathered, done, replaced)

    def _received(self, like: torch.Tensor) -> torch.Tensor:
        tensor = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        self._group.broadcast(tensor)
        return tensor

    def samples(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor[:, 0] if tensor.dim() == 2 else tensor
        if self._waiting.pop(SAMPLES, None):
            self.follow()
            flat.copy_(self._received(flat))
        return tensor

    def _refuse_unreached(self) -> None:
        if late := [place for place in self._waiting if place.in_forward]:
            for place in late:
                del self._waiting[place]
            self.follow()

    def _refuse_inside(self, call: Place, error: LocationError) -> None:
        if late := [each for each in self._waiting if each.path == call.path and each.is_inside(call)]:
            for place in late:
                del self._waiting[place]
            self.follow()
