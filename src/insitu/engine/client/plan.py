"""What a trace does, up to what drives its engine: requests go out in waves, and their results come back.

A plan is a generator. It yields the requests that are to run together, is sent their results, and in the end
returns the error that the caller shall see. Whether somebody waits for the results, or awaits them, is not
known here.
"""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from insitu.block import (
    ArgumentError,
    Block,
    CapturedBody,
    FunctionBlock,
    Lost,
    Saves,
    Site,
    UnsavedWarning,
)
from insitu.block.containers import changed
from insitu.block.tracebacks import user_lines
from insitu.engine.client.invokes import Invocation, hint_at_order, merged_error, merged_saves, waves
from insitu.engine.client.tracer import Tracer
from insitu.engine.job import Job
from insitu.engine.names import merged
from insitu.tree import current

if TYPE_CHECKING:
    from insitu.engine.client.engine import EngineClient
    from insitu.engine.client.result import Prepared, Result

Wave = list[tuple["Prepared", Job]]
Bind = Callable[[Mapping[str, Any]], None]
Plan = Generator[Wave, "list[Result]", BaseException | None]
FunctionPlan = Generator[Wave, "list[Result]", tuple[list[Any], BaseException | None]]


class Captured:
    """A block with what it needs of its caller: that, the copies of it that the block may change, and others that
    nobody does. Holds no frame."""

    def __init__(self, site: Site) -> None:
        self.block: Block = site.block
        self.module_name: str = site.scope.module_name
        self.given: dict[str, Any] = site.scope.values(site.block.reads)
        self.values: dict[str, Any] = site.scope.copied(self.given)
        self._before = site.scope.copied(self.given)

    def changed_apart(self) -> list[str]:
        """Names of what has changed in the caller itself while the block ran."""
        return changed(self.given, self._before)


class BaseTrace(Tracer):
    """One trace, and the ``tracer`` that its block knows.

    With a prompt, the body is the block of that request. Without, the body is run here to open the
    invokes, whose bodies are the blocks; all their requests are submitted together.
    """

    def __init__(
        self, engine: EngineClient, prompts: Sequence[Any], settings: Mapping[str, Any], keep: bool = False
    ) -> None:
        """``keep``: whether values stay on the engine's device."""
        refuse_in_block("a trace", "it")
        self._engine: EngineClient = engine
        self._settings = dict(settings)
        self._keep = keep
        self._prepared = engine.prepare_all(prompts, settings)
        self._invocations: list[Invocation] | None = None
        self._invokes: list[Invoke] = []
        if not prompts:
            engine.check(settings)

    @user_lines
    def invoke(self, prompt: Any, **sampling: Any) -> Invoke:
        """One prompt of a trace that has none itself; its body is that request's block.

        ``sampling`` wins over the trace's. A name saved in one invoke comes back as itself, one saved
        in several as a list in the order of the invokes.
        """
        if not self._prepared:
            refuse_in_block("an invoke", "each")
        if self._invocations is None:
            raise ArgumentError(
                "invokes are opened in the body of a trace without a prompt: `with model.trace() as tracer:`, "
                "then `with tracer.invoke(prompt):`"
            )
        settings = merged(self._settings, sampling) if sampling else self._settings
        one = Invoke(self._invocations, self._engine.prepare_early(prompt, settings))
        self._invokes.append(one)
        return one

    def target(self) -> Any:
        refuse_in_block("a trace", "it")
        return self

    def plan(self, captured: Captured, bind: Bind) -> Plan:
        """``bind`` gets what was saved, by name, before the plan returns."""
        return self._plan_one(captured, bind) if self._prepared else self._plan_invokes(captured, bind)

    def plan_function(self, function: Callable[[Any], Any]) -> FunctionPlan:
        """``function(tracer)`` beside each prompt; returns what it returned for each, and the error if any."""
        block = FunctionBlock(function)
        results = yield [(one, Job(_new_id(), block, tracer=self, keep=self._keep)) for one in self._prepared]
        error = results[0].error if len(results) == 1 else merged_error(results)
        return [result.returned for result in results], error

    def _plan_one(self, captured: Captured, bind: Bind) -> Plan:
        job = Job(_new_id(), captured.block, captured.values, captured.module_name, keep=self._keep)
        (result,) = yield [(self._prepared[0], job)]
        apart = captured.changed_apart()
        bind(result.saves)
        _warn_of_unsaved(captured, result.saves, result.lost, apart)
        return result.error

    def _plan_invokes(self, captured: Captured, bind: Bind) -> Plan:
        block, saves, self._invocations, self._invokes = captured.block, Saves(), [], []
        namespace = block.namespace(captured.values, saves, captured.module_name)
        try:
            with saves.active():
                block.execute(namespace)
            invocations = self._opened_invokes()
            self._engine.complete([one.prepared for one in invocations])
        except BaseException as error:
            if isinstance(error, NameError):
                hint_at_order(error, self._invocations)
            return error
        finally:
            self._invocations = None
        shared = frozenset(saves.collect(namespace, namespace))
        for wave in waves(invocations):
            yield from self._plan_wave(wave, shared)
        own = saves.collect(namespace, block.binds)
        lost = block.lost(saves, namespace, own)
        saved = {**merged_saves(invocations), **self._engine.bring_home(own, self._keep)}
        apart = captured.changed_apart()
        bind(saved)
        results = [one.result for one in invocations if one.result is not None]
        lost += [each for result in results for each in result.lost]
        _warn_of_unsaved(captured, saved, lost, apart)
        return merged_error(results)

    def _opened_invokes(self) -> list[Invocation]:
        left = [number for number, one in enumerate(self._invokes) if not one.entered]
        if left:
            raise ArgumentError(
                f"invoke {left[0]} of this trace was made and never entered, so its prompt would not run: write "
                f"`with tracer.invoke(prompt):`, with a block (`pass` is one)"
            )
        if not self._invocations:
            raise ArgumentError(
                "this trace has no prompt and opened no invoke: write `model.trace(prompt)`, or open "
                "`with tracer.invoke(prompt):` in it"
            )
        return self._invocations

    def _plan_wave(self, wave: list[Invocation], shared: frozenset[str]) -> Generator[Wave, list[Result], None]:
        ready: list[Invocation] = []
        for one in wave:
            if hindrance := one.hindrance:
                one.result = self._engine.refused(hindrance)
            else:
                ready.append(one)
        results = (yield [(one.prepared, self._job_of(one, shared)) for one in ready]) if ready else []
        for one, result in zip(ready, results, strict=True):
            one.result = result

    def _job_of(self, one: Invocation, shared: frozenset[str]) -> Job:
        job = Job(_new_id(), one.block, one.given, one.module_name, invoke=one.index, keep=self._keep)
        job.exports, job.shared = frozenset(one.exports), shared
        return job


class Invoke(CapturedBody):
    """One prompt of a trace and the block beside it."""

    def __init__(self, invocations: list[Invocation], prepared: Any) -> None:
        self._invocations = invocations
        self._prepared = prepared
        self.entered: bool = False

    def target(self) -> Invoke:
        refuse_in_block("an invoke", "each")
        if self.entered:
            raise ArgumentError(
                "this invoke was entered before; one is one request, so call `tracer.invoke(prompt)` again for another"
            )
        self.entered = True
        return self

    def run_block(self, site: Site) -> BaseException | None:
        block, scope = site.block, site.scope
        values = scope.values(block.reads)
        index = len(self._invocations)
        self._invocations.append(Invocation(index, block, values, scope.module_name, self._prepared))
        return None


def refuse_in_block(what: str, which: str) -> None:
    if current.get() is not None:
        raise ArgumentError(f"{what} can't be opened inside a block: open {which} after the one before has ended")


_PROCESS, _NUMBERS = uuid.uuid4().hex, count()


def _new_id() -> str:
    return f"{_PROCESS}-{next(_NUMBERS)}"


def _warn_of_unsaved(captured: Captured, saved: Mapping[str, Any], lost: Sequence[Lost], apart: Sequence[str]) -> None:
    """``apart``: names of what has changed in the caller itself."""
    block, kept = captured.block, {*saved, *apart}
    unsaved = [name for name in changed(captured.given, captured.values) if name not in kept]
    for name in apart:
        done = "the saved copy takes its place, so that change is lost" if name in saved else "the copy is as it was"
        warnings.warn_explicit(
            f"the caller's `{name}` was changed while the block ran, by a function that it calls, say, but the block "
            f"has a copy of its own, which does not show that; {done}. Hand `{name}` to the function as an argument",
            UnsavedWarning,
            block.filename,
            block.lineno,
        )
    for name in unsaved:
        warnings.warn_explicit(
            f"`{name}` was changed in the block but not saved, so the caller's `{name}` is as before: "
            f"write `{name}.save()` in the block",
            UnsavedWarning,
            block.filename,
            block.lineno,
        )
    for one in dict.fromkeys(lost):
        if one.holder not in unsaved:
            warnings.warn_explicit(one.message, UnsavedWarning, one.filename, one.lineno)
