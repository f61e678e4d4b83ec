"""A model as its user holds it: its tree, its tokenizer, and an engine, whoever drives that."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar, overload

from insitu.block import ArgumentError, EngineError, UnknownModuleError
from insitu.block.tracebacks import user_lines
from insitu.engine.client.prompts import token_ids
from insitu.engine.client.tokens import positions_of
from insitu.tree import Listing, ModelPlaces, Node, current, outline_html

E = TypeVar("E")
M = TypeVar("M", bound="BaseModel[Any]")
MISSING: Any = object()
"""Stands for a prompt that was not given."""


class BaseModel(ModelPlaces, Generic[E]):
    """What a model is whether its engine is waited for or awaited. Modules are attributes, by vLLM's own names."""

    _maker: ClassVar[str] = "VLLM"
    _later: ClassVar[dict[str, str]]
    """Names that mean something in other versions, and what to do without."""

    def __init__(
        self,
        repo: str,
        taps: Sequence[str],
        engine: Literal["in-process", "workers"] | None,
        engine_args: dict[str, Any],
    ) -> None:
        if engine not in (None, "in-process", "workers"):
            raise ArgumentError(
                f"engine={engine!r:.40}: it is 'in-process', 'workers', or left out, and then as the devices need. "
                f"The arguments of vllm.LLM are given here by name, and the LLM is in model.vllm_entrypoint"
            )
        self._workers = None if engine is None else engine == "workers"
        self._taps = tuple([taps] if isinstance(taps, str) else taps)
        self._repo = repo
        self._engine_args = engine_args
        self._engine: E | None = None
        self._closed = False
        self._lock = threading.RLock()
        self._owner = self._operations
        self._root = Node("", self._outline, self._owner)

    # -- the engine -----------------------------------------------------------------------

    @abstractmethod
    def _start(self) -> E:
        """A new engine."""

    @user_lines
    def dispatch(self: M) -> M:
        """Builds the engine, if there is none yet."""
        self._running()
        return self

    @property
    def dispatched(self) -> bool:
        """Whether the engine is running."""
        return self._engine is not None

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, as vLLM loads it."""
        running: Any = self._running()
        return running.tokenizer

    def close(self) -> None:
        """Stops the engine and gives its memory back. A closed model can't be traced again.

        Raises ``EngineError`` in a block of its own, which runs in that engine.
        """
        session = current.get()
        if session is not None and session.owner == self._owner:
            raise EngineError("the model can't be closed in a block that it runs: close it after the `with`")
        with self._lock:
            self._closed = True
            engine: Any = self._engine
            if engine is not None:
                engine.close()
                self._engine = None

    def __enter__(self: M) -> M:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _running(self) -> E:
        if self._engine is None:
            with self._lock:
                if self._closed:
                    raise EngineError(f"the model {self._repo!r} was closed; make a new {self._maker}({self._repo!r})")
                if self._engine is None:
                    self._engine = self._start()
        return self._engine

    @overload
    def positions_of(self, text: str, prompt: Any, *, occurrence: int = 0) -> range: ...
    @overload
    def positions_of(self, text: str, prompt: Any, *, every: Literal[True]) -> list[range]: ...
    @user_lines
    def positions_of(self, text: str, prompt: Any, *, occurrence: int = 0, every: bool = False) -> Any:
        """The positions of the tokens of ``prompt`` that ``text`` lies in, wholly or in part, as a range::

            hidden[model.positions_of("Eiffel Tower", prompt)]

        ``prompt`` is anything that ``trace`` takes; of a chat, the text is what the chat template makes.
        ``occurrence`` counts from 0, negative ones from the end; ``every=True`` gives a list of all.
        Raises ``PromptError``, which lists the tokens, if ``text`` does not occur.
        """
        tokenizer = self.tokenizer
        ids = token_ids(prompt, lambda: tokenizer)
        source = prompt if isinstance(prompt, str) else None
        return positions_of(tokenizer, ids, text, occurrence, every, source)

    def _operations(self, path: str, op: str) -> Listing | None:
        # Stands for the model on both sides, where its class may be another one.
        return self._listed(path, op)

    @abstractmethod
    def _listed(self, path: str, op: str) -> Listing | None:
        """The operations in a module's forward, if they can be told here and now."""

    def _outline(self) -> Any:
        engine: Any = self._engine
        return engine.outline if engine else None

    def _count_layers(self) -> int:
        running: Any = self._running()
        return running.layers

    # -- the tree -------------------------------------------------------------------------

    def get(self, path: str) -> Node:
        """The module at a dotted path."""
        return self._root.get(path)

    def __getattr__(self, name: str) -> Node:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._later:
            raise UnknownModuleError(f"`model.{name}` is not in this version, and no module: {self._later[name]}")
        return getattr(self._root, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            setattr(self._root, name, value)

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *dir(self._root)]

    def __repr__(self) -> str:
        if self._engine is None:
            state = "closed" if self._closed else "not built yet: model.dispatch() or the first trace builds it"
            return f"VLLM({self._repo!r})  # engine {state}"
        return self._outline().render()

    def _repr_html_(self) -> str | None:
        """The tree in a notebook, to fold out."""
        return outline_html(self._outline()) if self._engine else None


def returned_by(returned: list[Any], error: BaseException | None, several: bool) -> Any:
    """What ``run`` returns, or raises."""
    if error is not None:
        raise error
    return returned if several else returned[0]
