"""vLLM's V2 model runner (``vllm.v1.worker.gpu``), its default for dense models on GPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import ModuleType
from typing import Any

from insitu.engine.adapter import Adapter

Method = Callable[..., Any]

_eager: ContextVar[bool] = ContextVar("insitu_eager_step", default=False)


class V2Adapter(Adapter):
    """V2 has the order of a step in the input batch that it prepares, and computes logits when it samples.

    Whether a step runs eagerly it decides by two functions that it calls by name, so those are
    wrapped in its module, once, and ask whether the step at hand is an eager one.
    """

    METHODS = ("execute_model", "prepare_inputs", "sample", "sample_tokens")

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        home = sys.modules[_home(type(runner)).__module__]
        _let_steps_be_eager(home, "dispatch_cg_and_sync_dp", need_eager=True)
        _let_steps_be_eager(home, "set_forward_context", skip_compiled=True)

    @classmethod
    def fits(cls, runner: Any) -> bool:
        if not super().fits(runner):
            return False
        home = sys.modules[_home(type(runner)).__module__]
        return hasattr(home, "dispatch_cg_and_sync_dp") and hasattr(home, "set_forward_context")

    def order(self) -> list[str]:
        return self._batch.req_ids

    def execute_model(self, original: Method, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run"):
            return original(scheduled, *args, **kwargs)
        self.begin(scheduled)
        try:
            with _eager_step(self.waits_in_forward):
                return original(scheduled, *args, **kwargs)
        except BaseException:
            self.interleaver.close()
            raise

    def prepare_inputs(self, original: Method, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        batch = original(scheduled, *args, **kwargs)
        self._batch = batch
        if self.waits_in_forward:
            total = batch.num_tokens_after_padding
            self.interleaver.open(self.token_rows(batch.req_ids, scheduled.num_scheduled_tokens, total))
        return batch

    def sample(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        sampled = original(*args, **kwargs)
        if self.runs:
            self.interleaver.samples(sampled[0].sampled_token_ids)
        return sampled

    def compute_logits(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().compute_logits(*args, **kwargs)
        finally:
            self.interleaver.close()

    def sample_tokens(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if output is not None:
            self.mark_ended(getattr(output, "model_runner_output", output))
        return output


def _home(kind: type) -> type:
    """The class whose module has the step itself; platforms derive their runners from it."""
    return next(base for base in kind.__mro__ if "execute_model" in vars(base))


@contextmanager
def _eager_step(eager: bool) -> Iterator[None]:
    token = _eager.set(eager)
    try:
        yield
    finally:
        _eager.reset(token)


def _let_steps_be_eager(home: ModuleType, name: str, **switch: bool) -> None:
    function = getattr(home, name)
    if getattr(function, "insitu", False):
        return

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**kwargs, **switch} if _eager.get() else kwargs)

    wrapper.insitu = True  # type: ignore[attr-defined]
    setattr(home, name, wrapper)
