"""What the names of a block mean in another process than the caller's: its model, nodes and tracer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from insitu.block import EngineError, SentOnce
from insitu.engine.channel import UnknownBlockError
from insitu.engine.client.base_model import BaseModel
from insitu.engine.client.edit import EditTracer
from insitu.engine.client.model import VLLM
from insitu.engine.client.plan import BaseTrace, Invoke
from insitu.engine.client.trace import Trace
from insitu.run import Interleaver
from insitu.tree import Node, path_of

_BLOCKS_KEPT = 1024
_ORDINARY = frozenset((type(None), bool, int, float, str, bytes, tuple, list, dict, set, frozenset))


class ClientSide:
    """Names for what means something on both sides, and the blocks that the workers already have."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._sent: dict[str, None] = {}
        self._tracers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def name(self, obj: Any) -> Any:
        if type(obj) in _ORDINARY:
            return None
        if isinstance(obj, SentOnce):
            return self._block(obj) if obj.digest else None
        if isinstance(obj, BaseTrace):
            self._tracers[id(obj)] = obj
            return "tracer", id(obj), bool(obj._prepared)
        return named(obj, self._model)

    def find(self, name: Any) -> Any:
        kind, *rest = name
        if kind == "tracer":
            return self._tracers.get(rest[0])
        return found(name, self._model)

    def forget_blocks(self) -> None:
        """A message did not get there, and it can't be told which blocks have."""
        self._sent.clear()

    def _block(self, block: SentOnce) -> tuple[Any, ...]:
        known = block.digest in self._sent
        self._sent.pop(block.digest, None)
        self._sent[block.digest] = None
        if len(self._sent) > _BLOCKS_KEPT:
            del self._sent[next(iter(self._sent))]
        return ("block", block.digest) if known else ("block", block.digest, *block.__reduce__())


class WorkerSide:
    """The same in the worker: a model of which blocks can ask all that needs no client."""

    def __init__(self, repo: str, interleaver: Interleaver, tokenizer: Callable[[], Any]) -> None:
        self.model: VLLM = VLLM(repo)
        self.model._engine = _EngineInBlock(interleaver, tokenizer)  # type: ignore[assignment]
        self._modules = interleaver.modules
        self._blocks: dict[str, SentOnce] = {}

    def name(self, obj: Any) -> Any:
        if type(obj) in _ORDINARY:
            return None
        if isinstance(obj, BaseTrace):
            return "tracer", vars(obj)["insitu_name"]
        if isinstance(obj, Module) and (paths := self._modules.paths_of(obj)):
            return "node", paths[0]  # one of the model's own is given to another, which a block has read
        return named(obj, self.model)

    def find(self, name: Any) -> Any:
        kind, *rest = name
        if kind == "tracer":
            return self._tracer(*rest)
        if kind == "block":
            return self._block(*rest)
        return found(name, self.model)

    def _tracer(self, number: int, has_prompt: bool) -> Trace:
        tracer = Trace.__new__(Trace)
        vars(tracer).update(_engine=self.model._engine, _invocations=None, insitu_name=number)
        vars(tracer)["_prepared"] = [None] * has_prompt  # which tells its refusals
        return tracer

    def _block(self, digest: str, make: Any = None, fields: tuple[Any, ...] = ()) -> SentOnce:
        if make is None and digest not in self._blocks:
            raise UnknownBlockError(f"the block {digest[:8]} has not arrived in the engine's worker process")
        block = make(*fields) if make is not None else self._blocks.pop(digest)
        self._blocks[digest] = block
        if len(self._blocks) > _BLOCKS_KEPT:
            del self._blocks[next(iter(self._blocks))]
        return block


class _EngineInBlock:
    """An engine as far as a block that runs in its worker may ask for it."""

    def __init__(self, interleaver: Interleaver, tokenizer: Callable[[], Any]) -> None:
        self.outline = interleaver.modules.outline()
        self.layers = interleaver.anatomy.layers
        self.operations = interleaver.operations
        self._load = tokenizer
        self._tokenizer: Any = None

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = self._load()
        return self._tokenizer

    def __getattr__(self, name: str) -> Any:
        raise EngineError(f"`{name}` of the engine can't be used in a block, which runs in the engine's worker process")


def named(obj: Any, model: Any) -> Any:
    """The name of an object that stands for the same thing on both sides; None for all others."""
    if isinstance(obj, BaseModel):
        return ("model",) if obj is model else ("other model", obj._repo)
    if isinstance(obj, Node) and obj._lister == model._owner:
        return "node", path_of(obj)
    if isinstance(obj, Invoke):
        return ("invoke",)
    if isinstance(obj, EditTracer):
        return ("edit's tracer",)
    return None


def found(name: Any, model: Any) -> Any:
    kind, *rest = name
    if kind == "model":
        return model
    if kind == "other model":
        return VLLM(rest[0])
    if kind == "node":
        return model.get(rest[0]) if rest[0] else model._root
    if kind == "edit's tracer":
        return EditTracer(model._engine)
    return Invoke.__new__(Invoke)
