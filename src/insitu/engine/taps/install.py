"""Taps: an operation put at places of a model before it is compiled, so that its graphs have it too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.v1.worker.gpu_worker import Worker

from insitu.block import InsituError, LocationError
from insitu.engine.taps.names import places_of
from insitu.engine.taps.plan import NOTHING, Line, Plan
from insitu.engine.taps.tables import PARTS, Table, Vectors
from insitu.run import BlockRun, Interleaver, Rows
from insitu.run.anatomy import Anatomy
from insitu.run.modules import ModuleTable
from insitu.run.structure import tensors_in
from insitu.run.tapped import TappedInterleaver
from insitu.run.taps import Edits
from insitu.tree import Place

KEY = "insitu_taps"
"""Of ``additional_config``, which vLLM's compile cache is keyed by: code with other taps is other code."""
_OPERATION = "insitu::tap"
_HERE = "insitu.taps"
_VECTORS = 4
"""How many vectors can be added at once, by the number of requests that the engine runs at once."""

_BOUND = 0.02
"""Of what a table makes of rows, relative: above rounding of 16 bits, far below anything else."""

PassBy = Callable[[Place, list[torch.Tensor], list[torch.Tensor]], None]


@torch.library.custom_op(_OPERATION, mutates_args=["floating"])
def tap(floating: list[torch.Tensor], others: list[torch.Tensor], name: str) -> None:
    """Shows the tensors of a place to the taps of the engine whose forward this is."""
    if is_forward_context_available():
        taps = get_forward_context().no_compile_layers.get(_HERE)
        if taps is not None:
            taps.pass_by(name, floating, others)


@tap.register_fake
def _(floating: list[torch.Tensor], others: list[torch.Tensor], name: str) -> None:
    return None


def _captured(tensor: torch.Tensor) -> bool:
    """Whether what is done with it now is being recorded in a graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


@dataclass
class Tap:
    """One place. ``copies`` are what the graphs write to, ``rows`` of them: floating tensors, then others.

    ``table`` says what the graphs edit there; none where the place's tensors are not one row a token.
    """

    place: Place
    rows: int
    copies: list[torch.Tensor] | None = None
    floating: int = 0
    passed: bool = False
    table: Table | None = None

    def prepare(self, tensors: list[torch.Tensor], floating: int, vectors: Callable[[torch.Tensor], Vectors]) -> None:
        """Called first by the forward that vLLM measures memory with, of the shapes that graphs are going to have."""
        self.floating = floating
        tokens = tensors[0].shape[0]
        self.copies = [
            torch.zeros_like(each[:1]).repeat(self.rows, *[1] * (each.dim() - 1))
            if _by(each, tokens)
            else torch.zeros_like(each)
            for each in tensors
        ]
        first = tensors[0]
        alike = all(each.shape == first.shape and each.is_contiguous() for each in tensors)
        if self.rows and alike and first.dim() == 2 and floating == len(tensors) <= PARTS:
            self.table = Table(self.rows, vectors(first))
            self.table.edit_and_copy([copy[:1] for copy in self.copies], self.copies)  # compiled before it is captured

    def copy(self, tensors: list[torch.Tensor]) -> None:
        assert self.copies is not None
        if self.table is not None and tensors[0].shape[0] <= self.rows:
            self.table.edit_and_copy(tensors, self.copies)
            return
        for copy, tensor in zip(self.copies, tensors, strict=True):
            if tensor.dim() == 0 or tensor.shape == copy.shape:
                copy.copy_(tensor)
            elif tensor.shape[0] <= copy.shape[0]:
                copy[: tensor.shape[0]].copy_(tensor)

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self.copies or ()) + (self.table.nbytes if self.table else 0)


@dataclass
class Taps:
    """The taps of one engine. ``places`` are known from the start, the copies' shapes from its first forward.

    ``rows``: of the largest graph that holds a whole forward. ``requests``: how many the engine runs at once.
    """

    rows: int
    requests: int = 0
    taps: dict[str, Tap] = field(default_factory=dict)
    vectors: dict[int, Vectors] = field(default_factory=dict)
    error: InsituError | None = None
    shown: PassBy | None = None
    """Called where Python is at a tap, between compiled pieces or in an eager forward."""
    in_graph: Callable[[torch.Tensor], bool] = _captured
    _edits: Mapping[Place, Mapping[BlockRun, Any]] = field(default_factory=dict)
    _plan: Plan = NOTHING
    _rows: Mapping[Any, Rows] | None = None
    """Where the plan's edits lie in the tables."""

    @property
    def places(self) -> list[Place]:
        return [each.place for each in self.taps.values()]

    @property
    def nbytes(self) -> int:
        vectors = sum(each.memory.nbytes for each in self.vectors.values())
        return vectors + sum(each.nbytes for each in self.taps.values())

    def pass_by(self, name: str, floating: list[torch.Tensor], others: list[torch.Tensor]) -> None:
        here = self.taps[name]
        here.passed = True
        if self.shown is not None and not self.in_graph(floating[0]):
            self.shown(here.place, floating, others)
            return
        if here.copies is None:
            here.prepare([*floating, *others], len(floating), self._vectors_for)
        here.copy([*floating, *others])

    def _vectors_for(self, tensor: torch.Tensor) -> Vectors:
        width = tensor.shape[-1]
        if width not in self.vectors:
            self.vectors[width] = Vectors(_VECTORS * self.requests, width, tensor.device)
        return self.vectors[width]

    def copies(self, place: Place, rows: int) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        here = self.taps[str(place)]
        if here.copies is None or rows > self.rows:
            return None
        whole = here.copies[0].shape[0]
        tensors = [copy[:rows] if _by(copy, whole) else copy for copy in here.copies]
        return tensors[: here.floating], tensors[here.floating :]

    def editable(self, place: Place) -> list[torch.Tensor] | None:
        here = self.taps.get(str(place))
        return here.copies if here is not None and here.table is not None else None

    def fits(self, edits: Edits) -> bool:
        if self._is_set(edits):
            return True
        for width, vectors in self.vectors.items():
            mine = [vector for each in edits.values() for target in each.values() for vector in target.edits.vectors]
            if not vectors.fit([each for each in mine if each.shape[-1] == width]):
                return False
        return True

    def take(self, edits: Edits) -> Plan | None:
        if self._is_set(edits):
            return None
        self._edits = _affine(edits)
        held = [vector for each in edits.values() for target in each.values() for vector in target.edits.vectors]
        filled = {
            width: vectors.hold([each for each in held if each.shape[-1] == width])
            for width, vectors in self.vectors.items()
        }
        lines = {
            str(place): [_line(table.vectors, run, target) for run, target in each.items()]
            for place, each in edits.items()
            if (table := self.taps[str(place)].table) is not None
        }
        plan = Plan(lines, {width: slots for width, slots in filled.items() if slots})
        self.follow(plan)
        return plan

    def follow(self, plan: Plan) -> None:
        self._plan, self._rows = plan, None

    def share(self, plan: Plan, broadcast: Callable[[torch.Tensor], None]) -> None:
        for width, slots in plan.filled.items():
            self.vectors[width].share(slots, broadcast)

    def lay(self, rows: Mapping[Any, Rows], spans: Mapping[str, tuple[int, int]]) -> None:
        if rows is self._rows:
            return
        self._rows = rows
        lines = self._plan.lines
        runs = {run.request: range(mine.start, mine.stop) for run, mine in rows.items()} if lines else {}
        requests = {request: range(*span) for request, span in spans.items()} if lines else {}
        for place, each in self.taps.items():
            if each.table is not None:
                each.table.set([line.entry(runs, requests) for line in lines.get(place, ())])

    def clear(self) -> None:
        self._edits = {}
        self.follow(NOTHING)
        self.lay({}, {})

    def _is_set(self, edits: Edits) -> bool:
        """Whether these are those taken last, by the objects that they are."""
        return self._edits == _affine(edits)

    @torch.inference_mode()
    def faults(self) -> list[float]:
        """How far each table edits rows otherwise than it should, by norm and relative."""
        tables = [(each.table, each.copies or []) for each in self.taps.values()]
        return [table.fault(copies) if table is not None else 0.0 for table, copies in tables]

    def require_tables(self, faults: Sequence[float]) -> None:
        """Raises ``LocationError``, by name, for a tap whose table edits rows otherwise than it should."""
        for each, fault in zip(self.taps.values(), faults, strict=True):
            if not fault <= _BOUND:
                raise LocationError(
                    f"taps: the table of `{each.place}` edits rows otherwise than a block does (by norm, off by "
                    f"{fault:.2g}): leave it out of taps, and its place is served by eager steps"
                )

    def passed(self) -> dict[Place, bool]:
        """The places, and whether any forward has come by."""
        return {each.place: each.passed for each in self.taps.values()}


def install(runner: Any) -> Taps | None:
    """Puts the taps that the engine's settings name into the runner's model, which was just loaded."""
    config: VllmConfig = runner.vllm_config
    names = config.additional_config.get(KEY) if isinstance(config.additional_config, dict) else None
    if not names:
        return None
    taps = Taps(_rows_of_graphs(config), config.scheduler_config.max_num_seqs)
    compilation = config.compilation_config
    compilation.static_forward_context[_HERE] = taps
    if compilation.splitting_ops and _OPERATION not in compilation.splitting_ops:
        # Between the compiled pieces, so that these stay alike from layer to layer and Python is at the tap.
        compilation.splitting_ops.append(_OPERATION)
    table = ModuleTable(runner.get_model())
    try:
        places = places_of(names, table, Anatomy(table))
    except InsituError as error:
        taps.error = error  # raised where the client asks for it
        return taps
    for place in places:
        taps.taps[str(place)] = Tap(place, taps.rows)
        _hook(table[place.path], place)
    return taps


def interleaver_for(runner: Any, model: Any, unembed: Callable[..., Any], safe_ids: int) -> Interleaver:
    """What runs blocks beside this runner's model on one rank, by its taps if it has any.

    Raises what was wrong with the taps that were asked for.
    """
    taps = of(runner)
    if taps is None:
        return Interleaver(model, unembed, safe_ids)
    interleaver = TappedInterleaver(model, unembed, safe_ids, taps, is_repeatable(runner))
    taps.shown = interleaver.pass_by
    return interleaver


def is_repeatable(runner: Any) -> bool:
    """Whether a forward can be run twice with the same result."""
    return not runner.model_config.is_hybrid and not runner.model_config.is_attention_free


def without_one_graph(config: VllmConfig, pieces: dict[str, Any], eager: dict[str, Any]) -> dict[str, Any]:
    """Of two settings that keep a step out of whole graphs, the one that leaves it compiled, if it has a way."""
    return eager if config.compilation_config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL else pieces


def install_when_loaded() -> None:
    """Makes every worker of this process install its taps between loading the model and compiling it."""
    original = Worker.load_model
    if getattr(original, "insitu", False):
        return

    @wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = original(self, *args, **kwargs)
        install(self.model_runner)
        return loaded

    load_model.insitu = True  # type: ignore[attr-defined]
    Worker.load_model = load_model


def of(runner: Any) -> Taps | None:
    """The taps that were installed in the runner's model. Raises what was wrong with those that were asked for."""
    taps = runner.vllm_config.compilation_config.static_forward_context.get(_HERE)
    if taps is not None and taps.error is not None:
        raise taps.error
    return taps


def _hook(module: torch.nn.Module, place: Place) -> None:
    name = str(place)

    def before(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        floating, others = tensors_in((args, kwargs))
        torch.ops.insitu.tap(floating, others, name)

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        floating, others = tensors_in(output)
        torch.ops.insitu.tap(floating, others, name)

    if place.site == "input":
        module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        module.register_forward_hook(after)


def _line(vectors: Vectors, run: BlockRun, target: Any) -> Line:
    names = (run.request,) if run.many is None else run.many.requests
    slots, summed = vectors.slots(target.edits), target.stream is not None
    return Line(names, run.many is not None, summed, target.number, slots, target.edits.factors)


def _affine(edits: Edits) -> dict[Place, dict[BlockRun, Any]]:
    return {place: {run: target.edits for run, target in each.items()} for place, each in edits.items()}


def _rows_of_graphs(config: VllmConfig) -> int:
    """Rows of the largest graph that holds a whole forward."""
    compilation = config.compilation_config
    mode = compilation.cudagraph_mode
    if mode is None or mode == CUDAGraphMode.NONE or not mode.has_full_cudagraphs():
        return 0
    return max(compilation.cudagraph_capture_sizes or [0])


def _by(tensor: torch.Tensor, tokens: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == tokens


def nbytes(runner: Any) -> int:
    taps = of(runner)
    return taps.nbytes if taps else 0


def passed(runner: Any, faults: Sequence[float]) -> dict[Place, bool]:
    """As ``Taps.passed``. Raises ``LocationError`` for a table that does not do what it should."""
    taps = of(runner)
    if taps is None:
        return {}
    taps.require_tables(faults)
    return taps.passed()
