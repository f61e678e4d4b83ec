"""A later stage of a pipeline-parallel model, whose values the first one's blocks are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from insitu.block import EngineError, LocationError
from insitu.run.followed import FollowedRows
from insitu.run.interleaver import RowsOf
from insitu.run.parallel import Shadow
from insitu.run.parked import Told
from insitu.run.served import Rows, map_tensors, rebuilt, shares_elements, storage_of, tensors_of
from insitu.run.spanning import Spanning
from insitu.run.spread import Brought
from insitu.run.stages import (
    Answer,
    Arrived,
    Ask,
    Done,
    Failed,
    Handover,
    Link,
    Over,
    Recorded,
    Refused,
    Released,
    Report,
    Seen,
    Stages,
)
from insitu.tree import SAMPLES, Place, current


class StageShadow(Shadow):
    """A run as a later stage knows it."""

    def __init__(self, request: str) -> None:
        super().__init__(request)
        self.refused: Exception | None = None

    def refuse(self, error: Exception) -> None:  # type: ignore[override]
        self.refused = self.refused or error


class StageFollower(Spanning, Told):
    """Does in its forward what the first stage's blocks wait for."""

    shadow = StageShadow
    left: Sequence[str] = ()
    windowed: frozenset[str] = frozenset({"insitu_collect", "insitu_operations", "insitu_fit"})

    def __init__(self, root: torch.nn.Module, unembed: Callable[..., Any], safe_ids: int, link: Link) -> None:
        super().__init__(root, unembed, safe_ids, link)
        self._device = next(root.parameters()).device
        self.company = FollowedRows(self.shadow, self._device)
        self._shadows: dict[str, Any] = {}
        self._recorded: Recorded = {}
        self._recorded_places: frozenset[Place] = frozenset()
        self._visits: list[tuple[Place, tuple[str, ...]]] = []
        self._last: Place | None = None
        self._served = False
        self._drawn: torch.Tensor | None = None
        self.ended: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
        """Of the step: the requests that their blocks end, and those that may be preempted from now on."""

    def meet(self, own: Report) -> None:
        """To be called on all stages at once."""
        self._link.send(0, own)
        self.stages: Stages = self._link.receive(0)

    # -- one step -------------------------------------------------------------------------

    def begin(self, runs: Iterable[Any]) -> bool:
        """Does what blocks ask for until this stage's turn comes."""
        self._waiting.clear()
        self._sourced.clear()
        self._shadows = {run.request: run for run in runs}
        self._visits, self._last = [], None
        handover = self.follow()
        assert isinstance(handover, Handover)
        self._served, self.ended, self.left = handover.served, handover.over, handover.left
        self.order.complete = not handover.learning
        if handover.together:
            self.company.tell(handover.together)
            self._shadows.update(self.company.shadows)
        self._take(handover)
        waits = bool(self._recorded) or any(place.in_forward for place in self._waiting)
        return handover.eager or handover.learning or waits

    def open(self, rows: RowsOf) -> None:
        super().open(rows)
        self._watch_recorded()

    def over(self) -> None:
        """Ends this stage's part of the step, and waits until all others have ended theirs."""
        if not self._served:
            return
        self._served = False
        refused = {name: each.refused for name, each in self._shadows.items() if each.refused}
        drawn = {run.request: each.start for run, each in self.rows.items() if not each.members}
        self._link.send(0, Over(self._seen(), self._drawn, drawn, refused))
        self._drawn = None
        released = self.follow()
        assert isinstance(released, Released)
        self.ended = released.over

    def fail(self, error: BaseException) -> None:
        if self._served:
            self._served = False
            self._link.send(0, Failed(f"{type(error).__name__}: {error}"))

    def follow(self) -> Any:
        """Does what the first stage's blocks ask for, until it says something else."""
        while True:
            message = self._link.receive(0)
            if isinstance(message, Failed):
                self._served = False
                raise EngineError(f"the first stage of the pipeline has failed: {message.why}")
            if not isinstance(message, Ask):
                return message
            self._link.send(0, self._answer(message))

    def _answer(self, ask: Ask) -> Answer:
        args = map_tensors(ask.args, lambda tensor: tensor.to(self._device))
        token = current.set(ask)  # type: ignore[arg-type]  # for its adapter
        try:
            return Answer(getattr(self, ask.method)(*args))
        except Exception as error:
            return Answer(error=error)
        finally:
            current.reset(token)

    def _take(self, done: Done) -> None:
        self._drop_withdrawn(done.withdrawn)
        if done.recorded is not None:
            self._recorded = done.recorded
            self._recorded_places = frozenset().union(*(places for places, _ in done.recorded.values()))
            if self._open:
                self._watch_recorded()
        self._wait(done.parked)

    def _comes_to(self, place: Place) -> bool:
        return self._link.stage in self.stages.having(place)

    def _watch_recorded(self) -> None:
        for _, paths in self._recorded.values():
            for path in paths:
                if path in self.modules.by_path:
                    self._wrap(path)

    # -- one place ------------------------------------------------------------------------

    def _serve_if_awaited(self, place: Place, live: Any) -> Any:
        foreign = place.in_forward and self._link.stage not in self.stages.having(place)
        if foreign or self._is_handed_on(place):
            return live  # of a module of which each stage runs a part
        if place not in self._waiting and place not in self._recorded_places:
            return super()._serve_if_awaited(place, live)
        seen = self._seen()
        waiting = [run.request for run in self._arrived(place)]
        self._visits.clear()  # the first stage notes this one itself
        waiting += [name for name, (places, _) in self._recorded.items() if place in places]
        rows = self._rows_of_all(waiting)
        return self._shown(place, live, Brought(rows), seen) if rows else live

    def _shown(self, place: Place, live: Any, brought: Brought, seen: Seen) -> Any:
        tensors = list({id(each): each for each in tensors_of(live)}.values())
        rows = next(iter(self.rows.values()))
        fixed = self.modules.fixed
        apart = frozenset(n for n, each in enumerate(tensors) if storage_of(each) in fixed or rows.of(each) is None)
        value = {id(each): each if n in apart else brought.of(each) for n, each in enumerate(tensors)}
        sent = map_tensors(_plain(live), lambda tensor: value[id(tensor)])
        self._link.send(0, Arrived(place, tuple(self._active), sent, brought.rows, apart, seen))
        done = self.follow()
        self._take(done)
        return self._taken_over(live, tensors, brought, done)

    def _taken_over(self, live: Any, tensors: list[torch.Tensor], brought: Brought, done: Done) -> Any:
        replaced: dict[int, torch.Tensor] = {}
        for number, new in (*done.edited.items(), *done.replaced.items()):
            mine = tensors[number]
            if number in done.replaced or shares_elements(mine):
                mine = replaced.setdefault(id(mine), mine.clone())
            brought.put(mine, new)
        return map_tensors(live, lambda tensor: replaced.get(id(tensor), tensor)) if replaced else live

    def samples(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._served:
            return tensor
        flat = tensor[:, 0] if tensor.dim() == 2 else tensor
        seen, waiting = self._seen(), self._arrived(SAMPLES)
        if waiting:
            brought = Brought(self._rows_of_all(run.request for run in waiting))
            sent = brought.of(flat), self._vocabulary
            self._link.send(0, Arrived(SAMPLES, (), sent, brought.rows, frozenset(), seen))
            done = self.follow()
            self._take(done)
            brought.put(flat, done.edited[0])
        self._drawn = flat
        return tensor

    def _rows_of_all(self, names: Iterable[str]) -> dict[str, Rows]:
        """Those of these runs that have any."""
        found = ((name, self.rows.get(self._shadows[name])) for name in names)
        return {name: rows for name, rows in found if rows is not None}

    # -- what goes by ---------------------------------------------------------------------

    def _arrived(self, place: Place) -> list[Any]:
        if not self.order.complete:
            self._visits.append((place, tuple(self._active)))
        if not place.op:
            self._last = place
        return super()._arrived(place)

    def _seen(self) -> Seen:
        visits, self._visits = self._visits, []
        return Seen(visits, self._last)

    def close(self) -> None:
        super().close()
        self.order.complete = True

    def _refuse_unreached(self) -> None:
        while late := [place for place in self._waiting if place.in_forward]:
            self._tell({place: self._unreached(place) for place in late})

    def _refuse_inside(self, call: Place, error: LocationError) -> None:
        if late := [each for each in self._waiting if each.path == call.path and each.is_inside(call)]:
            self._tell(dict.fromkeys(late, error))

    def _tell(self, errors: dict[Place, Any]) -> None:
        for place in errors:
            del self._waiting[place]
        self._link.send(0, Refused(errors, self._seen()))
        self._take(self.follow())


def _plain(value: Any) -> Any:
    """Objects of the model's own that stand beside tensors stay here."""
    if isinstance(value, (tuple, list)):
        return rebuilt(value, [_plain(part) for part in value])
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    known = value is None or isinstance(value, (torch.Tensor, bool, int, float, str))
    return value if known else Kept(type(value).__name__)


class Kept:
    """Stands on the first stage for an object of a later one."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __repr__(self) -> str:
        return f"<{self._kind}>"
