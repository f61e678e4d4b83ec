"""What the block of a group of requests does, written down."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch

from insitu.block import FunctionBlock, Saves
from insitu.engine.client.steps import StepLoop, Steps
from insitu.engine.client.tracer import Tracer
from insitu.engine.job import Job
from insitu.net.form_block import FormBlock
from insitu.run import Interleaver
from insitu.run.held import Held, NotStraightError, Shown, require_known
from insitu.run.noted import Program, mapped
from insitu.run.shown import BUILTINS, Outside, shown, with_values
from insitu.run.straight import Recording
from insitu.run.sym import Sym, can_come_home, captured, ref_of
from insitu.run.together import Together
from insitu.run.torch_state import BlockState
from insitu.tree import LayerStream, ModelPlaces, Node, current, session_for

if TYPE_CHECKING:
    from insitu.engine.worker.cohorts import Candidate


class Writing:
    """Writes down what the block of a group does; several times, if requests end at different steps."""

    def __init__(self, group: Sequence[Candidate], interleaver: Interleaver, others: Callable[[], bool]) -> None:
        self.own: dict[int, Sequence[torch.Tensor]] = {}
        self._group = group
        self._interleaver = interleaver
        self._others = others
        self._after: dict[int, Program | None] = {}
        self.widths: dict[int, int] = {}
        """Of what a restricted block reads, how large a row is."""
        self.makes: type[Together] = Together
        self._seen: list[tuple[Any, Any]] = []
        self._versions: list[tuple[list[torch.Tensor], list[int]]] = []

    @property
    def is_restricted(self) -> bool:
        """Whether it is code that may use so much and no more, and fail by nothing but what it does alone."""
        return hasattr(self._group[0].job.block, "rehearsed")

    def ended_after(self, steps: int) -> Program | None:
        if steps not in self._after:
            self._after[steps] = self.written_down(steps, over=True)
        return self._after[steps]

    def written_down(self, ends: int, over: bool = False) -> Program | None:
        first, places = self._group[0].job, self._interleaver.anatomy
        recording = Recording(
            first.owner,
            self._interleaver.kinds.get,
            lambda name, layer: places.stream(name, layer).place,
            min(one.tokens for one in self._group),
            ends,
            {one.job.length for one in self._group},
            over,
        )
        program = recording.program
        token = current.set(cast("Any", recording))
        try:
            with BlockState():
                self._write_down(first, recording)
            if not program.refused:
                self._rehearse(program, ends)
        except NotStraightError:
            return None
        except Exception as error:
            if over and (self.is_restricted or _is_made_up(error)):
                return None
            program.error = error
        finally:
            recording.close()
            current.reset(token)
        return None if program.refused else program

    def _rehearse(self, program: Program, ends: int) -> None:
        """Finds out how much a block that may use so much alone is going to use, for the longest prompt."""
        block: Any = self._group[0].job.block
        room = self._interleaver
        around = max(one.tokens for one in self._group), ends, room.anatomy, room.kinds.get
        if _is_form(block):
            from insitu.engine.worker.form import RestrictedTogether, form_rehearsed

            self.makes = RestrictedTogether
            self.widths.update(form_rehearsed(block.fn, program, around, self.own))
        elif self.is_restricted:
            self.makes = block.together
            self.widths.update(block.rehearsed(program, around, self.own))

    def _write_down(self, job: Job, recording: Recording) -> None:
        block: Any = job.block
        program = recording.program
        if _is_form(block):
            from insitu.engine.worker.form import form_written  # and with it the guard, which others have no use of

            device = next(self._interleaver.modules.root.parameters()).device
            program.returned = _at_home(recording, form_written(block.fn, StepsAlone(), device))
            return
        if isinstance(block, FunctionBlock):
            if type(block.fn) is not FunctionType:
                raise NotStraightError
            function = with_values(block.fn, self._show)
            names = Outside(block.fn)
            self._seen.append((names, names()))
            program.returned = _at_home(recording, function(StepsAlone()))
            return
        if not hasattr(block, "namespace"):  # a function from the network
            program.returned = _at_home(recording, block.written(StepsAlone(), self._show, recording))
            return
        saves = Saves()
        values = {name: self._value_of(recording, name, value) for name, value in job.values.items()}
        if hasattr(block, "written"):
            namespace = block.written(values, saves, self._show, recording)
        else:
            require_known(block.code)
            namespace = block.namespace(values, saves, "")
            namespace.update(__builtins__=BUILTINS, __name__=job.module_name)
        block.execute(namespace)
        saved = saves.collect(namespace, block.binds)
        home = {*saved, *job.shared}
        if not saves.all_home(namespace, home):
            raise NotStraightError  # whether it is lost depends on who else holds it
        program.saves = {name: _at_home(recording, value) for name, value in saved.items()}
        program.lost = block.lost(saves, namespace, home)

    def _show(self, value: Any) -> Any:
        if isinstance(value, Tracer):
            return StepsAlone()
        knows = getattr(self._group[0].job.block, "knows", _never)
        seen = shown(value, lambda value: _answers(value) or knows(value))
        if isinstance(seen, (Held, Shown)):
            if self._others():
                raise NotStraightError  # they may change it
            self._seen.append((value, _state(value)))
        return seen

    def _value_of(self, recording: Recording, name: str, value: Any) -> Any:
        if type(value) is torch.Tensor and any(one.job.values[name] is not value for one in self._group):
            self._show(value)
            sym = captured(recording, value)
            mine = self.own[ref_of(sym).number] = [one.job.values[name] for one in self._group]
            self._versions.append((mine, [each._version for each in mine]))
            recording.keep(sym)
            return sym
        return self._show(value)

    def stale(self) -> str | None:
        """What is to be told if a value of the caller's is not what it was."""
        same = all(_state(value) == state for value, state in self._seen)
        if same and all([each._version for each in own] == versions for own, versions in self._versions):
            return None
        return (
            "a tensor, list or name that the block was given has changed since it began, and the block had been read "
            "ahead with its old value: give each trace its own"
        )


def _is_form(block: Any) -> bool:
    return isinstance(block, FunctionBlock) and isinstance(block.fn, FormBlock)


def _is_made_up(error: Exception) -> bool:
    """Whether it misses a builtin function that blocks have when they run."""
    return isinstance(error, NameError) and hasattr(builtins, error.name or "")


def _never(_: Any) -> bool:
    return False


def _state(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value._version
    return value() if isinstance(value, Outside) else tuple(map(id, value))


def _at_home(recording: Recording, value: Any) -> Any:
    if not can_come_home(value, set(), recording.copied):
        raise recording.refused()
    return mapped(value, Sym, ref_of)


class StepsAlone:
    """What a block that is written down sees of its tracer."""

    @property
    def iter(self) -> Steps:
        return Steps()

    def all(self) -> StepLoop:
        return Steps()[:]

    def next(self) -> None:
        session_for("`tracer.next()`").move_on()

    def __getattr__(self, name: str) -> Any:
        raise NotStraightError


def _answers(value: Any) -> bool:
    """Whether it asks the session of the block for all that it says."""
    return isinstance(value, (ModelPlaces, Node, LayerStream))
