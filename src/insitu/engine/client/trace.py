"""A trace: the ``with`` statement whose body runs in the engine, and the ``tracer`` in it."""

from __future__ import annotations

import threading
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from insitu.block import (
    ArgumentError,
    Block,
    CapturedBody,
    FunctionBlock,
    Lost,
    PromptError,
    Saves,
    Site,
    UnsavedWarning,
    save,
)
from insitu.block.tracebacks import user_lines
from insitu.engine.client.invokes import Invocation, hint_at_order, merged_error, merged_saves, waves
from insitu.engine.client.steps import StepLoop, Steps
from insitu.engine.client.tokens import positions_of, token_strings
from insitu.engine.job import Job
from insitu.engine.names import merged
from insitu.tree import RESULT, current, session_for

if TYPE_CHECKING:
    from insitu.engine.client.engine import Engine
    from insitu.run import Cache


class Trace(CapturedBody):
    """One trace, and the ``tracer`` that its block knows.

    With a prompt, the body is the block of that request. Without, the body is run here to open the
    invokes, whose bodies are the blocks; all their requests are submitted together.
    """

    def __init__(
        self, engine: Engine, lock: threading.RLock, prompts: Sequence[Any], settings: Mapping[str, Any]
    ) -> None:
        _refuse_in_block("a trace", "it")
        self._engine = engine
        self._lock = lock
        self._settings = dict(settings)
        self._prepared = [engine.prepare(prompt, settings) for prompt in prompts]
        self._invocations: list[Invocation] | None = None
        self._invokes: list[Invoke] = []
        if not prompts:
            engine.check(settings)

    # -- in the block ---------------------------------------------------------------------

    @property
    def result(self) -> Any:
        """The finished ``vllm.RequestOutput``. Served last: nothing can be read after it."""
        return session_for("`tracer.result`").read(RESULT)

    @property
    def tokens(self) -> list[str]:
        """The text of each token of this request's sequence as the block's step finds it, by position: those
        of its prompt, special ones too, and those generated before this step.

        A token that holds only a part of a character is shown as U+FFFD.
        """
        session = session_for("`tracer.tokens`")
        return token_strings(self._engine.tokenizer, [*_known(session.prompt), *session.drawn_ids()])

    @overload
    def positions_of(self, text: str, *, occurrence: int = 0) -> range: ...
    @overload
    def positions_of(self, text: str, *, every: Literal[True]) -> list[range]: ...
    def positions_of(self, text: str, *, occurrence: int = 0, every: bool = False) -> Any:
        """The positions of the prompt's tokens that ``text`` lies in; as ``model.positions_of``."""
        prompt = _known(session_for("`tracer.positions_of`").prompt)
        return positions_of(self._engine.tokenizer, prompt, text, occurrence, every)

    @property
    def iter(self) -> Steps:
        """Loops over steps of generation; step 0 is the prefill::

            for step in tracer.iter[:]:     # every step, until the request ends
            for step in tracer.iter[1:4]:   # or some of them; also [2], [[0, 3]]
            with tracer.iter[:] as step:    # the same as a with statement

        Reading a place in the body reads that step's.
        """
        return Steps()

    def all(self) -> StepLoop:
        """Every step of generation: ``tracer.iter[:]``."""
        return self.iter[:]

    def barrier(self, count: int) -> Callable[[], None]:
        """For code that has it: what is returned is called in ``count`` invokes, and holds none of them up.

        It need not, since an invoke that reads a name which an earlier one binds runs after it.
        """
        return lambda: None

    def next(self) -> None:
        """Moves the block on to the next step."""
        session_for("`tracer.next()`").move_on()

    def stop(self) -> None:
        """Makes this step the request's last: its token is drawn, and ``finish_reason`` is ``"stop"``."""
        session_for("`tracer.stop()`").stop()

    def cache(
        self,
        modules: Any = None,
        inputs: bool = False,
        outputs: bool = True,
        device: Any = "cpu",
        dtype: Any = None,
        detach: bool = True,
    ) -> Cache:
        """Records what modules return (and are called with) from here on, in every step, holding nothing up.

        ``modules``: names, patterns (``*`` is one segment of a path, ``**`` any number), nodes, or a list
        of these; all if left out. Values are this request's rows, as the block itself would read them
        there, its own edits at that place included; they are kept on ``device`` (``None``: where they
        are), and floating ones in ``dtype``. ``detach`` makes no difference, as vLLM keeps no gradients.

        The cache comes home without ``.save()``, under each name of the block that holds it. It begins
        with the place at which the block is. Raises ``UnknownModuleError``, naming the nearest, for a
        name or pattern that means no module.
        """
        session = session_for("`tracer.cache`")
        return save(session.cache(modules, inputs=inputs, outputs=outputs, device=device, dtype=dtype))

    @user_lines
    def invoke(self, prompt: Any, **sampling: Any) -> Invoke:
        """One prompt of a trace that has none itself; its body is that request's block.

        ``sampling`` wins over the trace's. A name saved in one invoke comes back as itself, one saved
        in several as a list in the order of the invokes.
        """
        if not self._prepared:
            _refuse_in_block("an invoke", "each")
        if self._invocations is None:
            raise ArgumentError(
                "invokes are opened in the body of a trace without a prompt: `with model.trace() as tracer:`, "
                "then `with tracer.invoke(prompt):`"
            )
        one = Invoke(self._invocations, self._engine.prepare(prompt, merged(self._settings, sampling)))
        self._invokes.append(one)
        return one

    def target(self) -> Trace:
        _refuse_in_block("a trace", "it")
        return self

    # -- leaving the with statement -------------------------------------------------------

    def run_block(self, site: Site) -> BaseException | None:
        with self._lock:
            return self._run_one(site) if self._prepared else self._run_invokes(site)

    def _run_one(self, site: Site) -> BaseException | None:
        given, values, before = _captured(site)
        job = Job(_new_id(), site.block, values, site.scope.module_name)
        (result,) = self._engine.run([(self._prepared[0], job)])
        apart = site.scope.changed_unsaved(given, before)
        site.scope.bind(result.saves)
        _warn_of_unsaved(site, given, values, result.saves, result.lost, apart)
        return result.error

    def _run_invokes(self, site: Site) -> BaseException | None:
        given, values, before = _captured(site)
        saves, self._invocations, self._invokes = Saves(), [], []
        namespace = site.block.namespace(values, saves, site.scope.module_name)
        try:
            with saves.active():
                site.block.execute(namespace)
            invocations = self._opened_invokes()
        except BaseException as error:
            if isinstance(error, NameError):
                hint_at_order(error, self._invocations)
            return error
        finally:
            self._invocations = None
        shared = frozenset(saves.collect(namespace, namespace))
        for wave in waves(invocations):
            self._run_wave(wave, shared)
        own = saves.collect(namespace, site.block.binds)
        lost = site.block.lost(saves, namespace, own)
        saved = {**merged_saves(invocations), **self._engine.bring_home(own)}
        apart = site.scope.changed_unsaved(given, before)
        site.scope.bind(saved)
        results = [one.result for one in invocations if one.result is not None]
        lost += [each for result in results for each in result.lost]
        _warn_of_unsaved(site, given, values, saved, lost, apart)
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

    def _run_wave(self, wave: list[Invocation], shared: frozenset[str]) -> None:
        ready: list[Invocation] = []
        for one in wave:
            if hindrance := one.hindrance:
                one.result = self._engine.refused(hindrance)
            else:
                ready.append(one)
        jobs = [
            Job(_new_id(), one.block, one.given, one.module_name, exports=frozenset(one.exports), shared=shared)
            for one in ready
        ]
        results = self._engine.run([(one.prepared, job) for one, job in zip(ready, jobs, strict=True)])
        for one, result in zip(ready, results, strict=True):
            one.result = result

    def run_function(self, function: Callable[[Any], Any]) -> tuple[list[Any], BaseException | None]:
        """``function(tracer)`` beside each prompt; what it returned for each, and the error if any."""
        with self._lock:
            block = FunctionBlock(function)
            results = self._engine.run([(one, Job(_new_id(), block, tracer=self)) for one in self._prepared])
            error = results[0].error if len(results) == 1 else merged_error(results)
            return [result.returned for result in results], error


class Invoke(CapturedBody):
    """One prompt of a trace and the block beside it."""

    def __init__(self, invocations: list[Invocation], prepared: Any) -> None:
        self._invocations = invocations
        self._prepared = prepared
        self.entered = False

    def target(self) -> Invoke:
        _refuse_in_block("an invoke", "each")
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


def _captured(site: Site) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What the block needs of its caller, the copies of it that the block may change, and others that nobody does."""
    given = site.scope.values(site.block.reads)
    return given, site.scope.copied(given), site.scope.copied(given)


def _refuse_in_block(what: str, which: str) -> None:
    if current.get() is not None:
        raise ArgumentError(f"{what} can't be opened inside a block: open {which} after the one before has ended")


def _known(prompt: Sequence[int] | None) -> Sequence[int]:
    if prompt is None:
        raise PromptError("the prompt was given by embeddings, so that it has no tokens")
    return prompt


def _new_id() -> str:
    return uuid.uuid4().hex


def _warn_of_unsaved(
    site: Site,
    given: Mapping[str, Any],
    values: Mapping[str, Any],
    saved: Mapping[str, Any],
    lost: Sequence[Lost],
    apart: Sequence[str],
) -> None:
    """``apart``: names of what has changed in the caller itself."""
    block: Block = site.block
    changed = site.scope.changed_unsaved(given, values, {*saved, *apart})
    for name in apart:
        done = "the saved copy takes its place, so that change is lost" if name in saved else "the copy is as it was"
        warnings.warn_explicit(
            f"the caller's `{name}` was changed while the block ran, by a function that it calls, say, but the block "
            f"has a copy of its own, which does not show that; {done}. Hand `{name}` to the function as an argument",
            UnsavedWarning,
            block.filename,
            block.lineno,
        )
    for name in changed:
        warnings.warn_explicit(
            f"`{name}` was changed in the block but not saved, so the caller's `{name}` is as before: "
            f"write `{name}.save()` in the block",
            UnsavedWarning,
            block.filename,
            block.lineno,
        )
    for one in dict.fromkeys(lost):
        if one.holder not in changed:
            warnings.warn_explicit(one.message, UnsavedWarning, one.filename, one.lineno)
