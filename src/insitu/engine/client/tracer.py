"""The ``tracer`` of a block: what it asks of its own request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from insitu.block import PromptError, save
from insitu.engine.client.steps import StepLoop, Steps
from insitu.engine.client.tokens import positions_of, token_strings
from insitu.tree import RESULT, session_for

if TYPE_CHECKING:
    from insitu.run import Cache


class Tracer:
    """What a block knows of its request, beside the places of the model."""

    _engine: Any

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


def _known(prompt: Sequence[int] | None) -> Sequence[int]:
    if prompt is None:
        raise PromptError("the prompt was given by embeddings, so that it has no tokens")
    return prompt
