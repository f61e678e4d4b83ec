"""What the stages of a pipeline-parallel model tell each other.

Blocks run on the first stage and nowhere else. A later stage that comes to a place where a block waits sends the rows
of the requests concerned to the first one, which runs their blocks and sends back what they have edited. So the stages
take turns in a step in which some block waits for a place of a later one; in all others they overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from insitu.block import LocationError
from insitu.run.anatomy import Anatomy
from insitu.run.followed import News
from insitu.run.modules import ModuleTable
from insitu.run.parked import Parked
from insitu.run.served import Rows
from insitu.run.stream import Stream
from insitu.tree import LOGITS, SAMPLES, Module, Outline, Place

MISSING = frozenset({"PPMissingLayer", "StageMissingLayer"})
"""What vLLM puts where another stage has a module."""

Recorded = Mapping[str, tuple[frozenset[Place], tuple[str, ...]]]
"""By run: the places that are recorded for it, and the modules to watch for that."""


class Link(Protocol):
    """Messages between the first stage and the others. Each of the two sides knows when the other one sends."""

    stage: int
    stages: int

    def send(self, stage: int, message: Any) -> None: ...

    def receive(self, stage: int) -> Any: ...


@dataclass(frozen=True)
class Report:
    """What a stage has. ``real``: the paths of its modules, without those that another one has."""

    outline: Outline
    real: frozenset[str]
    streams: dict[tuple[str, int | None], Stream | str]
    """The standard names of its layers and of the model, or why one is not known."""
    parameters: int


@dataclass
class Done:
    """From the first stage: its blocks all wait again, or have ended."""

    parked: Parked = field(default_factory=dict)
    withdrawn: list[str] = field(default_factory=list)
    recorded: Recorded | None = None
    """If that has changed."""
    edited: dict[int, torch.Tensor] = field(default_factory=dict)
    """The tensors of the place that were edited where they are, by number."""
    replaced: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class Handover(Done):
    """From the first stage: the forward of a later one may begin. ``served``: whether messages of its are waited for
    in this step; if not, ``over`` says the rest. ``learning``: the order of places is to be told. ``eager``: the
    stage before ran so, and its rows are not padded as graphs want them. ``left``: the requests whose blocks have all
    ended. ``together``: the runs that each stand for many requests, if that has changed."""

    served: bool = False
    learning: bool = False
    eager: bool = False
    over: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    left: tuple[str, ...] = ()
    together: News = field(default_factory=dict)


@dataclass(frozen=True)
class Released:
    """From the first stage: all blocks are done with the step. ``over``: the requests that end here, and those that
    may be preempted from now on."""

    over: tuple[frozenset[str], frozenset[str]]


@dataclass(frozen=True)
class Failed:
    """The step has failed on the other side."""

    why: str


@dataclass(frozen=True)
class Ask:
    """From the first stage, at any time in a step: something to be done with the modules of a later one."""

    method: str
    args: tuple[Any, ...]
    adapter: Any = None


@dataclass(frozen=True)
class Answer:
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True)
class Seen:
    """What a later stage has come by since its last message, each place with the calls that it is inside of."""

    visits: list[tuple[Place, tuple[str, ...]]]
    last: Place | None


@dataclass(frozen=True)
class Arrived:
    """From a later stage: the forward is at a place where blocks wait, or where values are recorded. ``value`` has only
    the rows of those; ``rows`` says which are whose, by run. ``apart``: the tensors, by number, that do not go by
    rows."""

    place: Place
    calls: tuple[str, ...]
    value: Any
    rows: dict[str, Rows]
    apart: frozenset[int]
    seen: Seen


@dataclass(frozen=True)
class Refused:
    """From a later stage: these places can't be served any more."""

    errors: dict[Place, LocationError]
    seen: Seen


@dataclass(frozen=True)
class Over:
    """From a later stage: its part of the step is over. ``drawn``: the ids that were sampled, and which
    is each run's that is one request's, by the last one. ``refused``: runs whose edits can't be taken."""

    seen: Seen
    drawn: torch.Tensor | None = None
    rows: dict[str, int] = field(default_factory=dict)
    refused: dict[str, Exception] = field(default_factory=dict)


def report_of(modules: ModuleTable, anatomy: Anatomy, of_model: Sequence[str], of_layer: Sequence[str]) -> Report:
    outline = modules.outline()
    real = frozenset(path for path, module in outline.modules.items() if module.kind not in MISSING)
    names: list[tuple[str, int | None]] = [(name, None) for name in of_model]
    names += [(name, layer) for layer in range(anatomy.layers) if anatomy.layer(layer) in real for name in of_layer]
    streams: dict[tuple[str, int | None], Stream | str] = {}
    for name, layer in names:
        try:
            streams[name, layer] = anatomy.stream(name, layer)
        except LocationError as error:
            streams[name, layer] = str(error)
    return Report(outline, real, streams, modules.parameters)


class Stages:
    """Which stage has what."""

    def __init__(self, reports: Sequence[Report]) -> None:
        self.reports = reports
        self.count: int = len(reports)
        self._having: dict[Place, list[int]] = {}

    @cached_property
    def spanning(self) -> frozenset[str]:
        """Modules of which each stage runs a part: they begin on the first one, and return on the last."""
        above: list[frozenset[str]] = []
        for report in self.reports:
            others = frozenset[str]().union(*(other.real for other in self.reports if other is not report))
            above.append(frozenset(part for path in report.real - others for part in _above(path)))
        return frozenset.intersection(*above)

    def having(self, place: Place) -> list[int]:
        """The stages whose forward may come to ``place``, in order."""
        if place not in self._having:
            self._having[place] = self._found(place)
        return self._having[place]

    def _found(self, place: Place) -> list[int]:
        if place in (LOGITS, SAMPLES):
            return [self.count - 1]
        found = [stage for stage, report in enumerate(self.reports) if place.path in report.real]
        if place.path in self.spanning and not place.op:
            return [found[0]] if place.site == "input" else [found[-1]]
        return found

    def calling(self, path: str) -> int:
        """The stage that is to run a module for a block."""
        return next((stage for stage, report in enumerate(self.reports) if path in report.real), 0)

    @cached_property
    def outline(self) -> Outline:
        modules: dict[str, Module] = {}
        for report in self.reports:
            for path, module in report.outline.modules.items():
                known = modules.get(path)
                if known is None or known.kind in MISSING:
                    modules[path] = module
                elif module.kind not in MISSING:
                    children = tuple(dict.fromkeys((*known.children, *module.children)))
                    modules[path] = Module(known.kind, children, known.note)
        return Outline(modules)

    def stream(self, name: str, layer: int | None) -> Stream:
        """Where a standard name is computed, as the stage that has it says."""
        found = next(report.streams[name, layer] for report in self.reports if (name, layer) in report.streams)
        if isinstance(found, str):
            raise LocationError(found)
        return found


def _above(path: str) -> list[str]:
    """The paths of the modules around ``path``."""
    parts = path.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))]
