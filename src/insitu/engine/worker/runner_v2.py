"""vLLM's V2 model runner (``vllm.v1.worker.gpu``), its default for dense models on GPUs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar

import torch
from vllm.forward_context import set_forward_context

from insitu.engine.taps.install import without_one_graph
from insitu.engine.worker.adapter import Adapter, Method

_EAGER = {"need_eager": True, "skip_compiled": True}
_PIECES = {"uniform_token_count": None}
_switches: ContextVar[Mapping[str, Any]] = ContextVar("insitu_step", default=MappingProxyType({}))
"""Arguments of vLLM's two functions that are to be others in the step at hand."""


class V2Adapter(Adapter):
    """V2 has the order of a step in the input batch that it prepares, and computes logits when it samples.

    Whether a step runs eagerly it decides by two functions that it calls by name, so those are
    wrapped in its module, once, and ask whether the step at hand is an eager one.
    """

    METHODS: ClassVar[tuple[str, ...]] = ("prepare_inputs", "sample", "sample_tokens")

    scored: torch.Tensor | None

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        home = sys.modules[_home(type(runner)).__module__]
        _let_steps_choose(home, "dispatch_cg_and_sync_dp")
        _let_steps_choose(home, "set_forward_context")

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
        self.begin_here(scheduled)
        if not self.stands_in:
            return original(scheduled, *args, **kwargs)
        try:
            with _step(self._path()), self.eager_kernels() if self.waits_in_forward else nullcontext():
                output = original(scheduled, *args, **kwargs)
            if self.tapped and self.at_taps.after_compiled():
                self._forward_again()
        except BaseException as error:
            self.fail_forward(error)
            self.interleaver.close()
            raise
        if not self.runner.is_last_pp_rank:
            self.interleaver.close()
            self.end_forward()
        return output

    def prepare_inputs(self, original: Method, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        batch = original(scheduled, *args, **kwargs)
        self._batch = batch
        if self.waits_in_forward or self.tapped:
            total = batch.num_tokens_after_padding
            self._rows = self.token_rows(batch.req_ids, scheduled.num_scheduled_tokens, total)
            if self.tapped:
                self.at_taps.open_compiled(self._rows, self.spans)
            else:
                self.interleaver.open(self._rows)
        return batch

    def _path(self) -> Mapping[str, Any]:
        if self.waits_in_forward:
            return _EAGER
        if self.tapped and not self.interleaver.one_graph:
            return without_one_graph(self.runner.vllm_config, _PIECES, {"need_eager": True})
        return {}

    def _forward_again(self) -> None:
        """The step's forward once more, eagerly."""
        self.count_again()
        self.interleaver.open(self._rows)
        runner, state, batch = self.runner, self.runner.execute_model_state, self._batch
        inputs = {"input_ids": batch.input_ids, "positions": batch.positions}
        inputs |= {"inputs_embeds": None, "intermediate_tensors": None}
        inputs |= runner.model_state.prepare_inputs(batch, runner.req_states)
        with (
            set_forward_context(
                state.attn_metadata,
                runner.vllm_config,
                num_tokens=batch.num_tokens_after_padding,
                slot_mapping=state.slot_mappings_by_layer,
                skip_compiled=True,
            ),
            self.eager_kernels(),
        ):
            hidden = runner.model(**inputs)
        runner.execute_model_state = state._replace(hidden_states=hidden)

    def sample(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        sampled = original(*args, **kwargs)
        if self.traced:
            self.serve_samples(sampled[0], self.scored)
        self.scored = None
        return sampled

    def compute_logits(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().compute_logits(*args, **kwargs)
        finally:
            self.interleaver.close()

    def sample_tokens(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        self.begin_sampling()
        output = original(*args, **kwargs)
        if output is not None:
            self.mark_ended(getattr(output, "model_runner_output", output))
            self.use_wait(output)
        return output


def _home(kind: type) -> type:
    """The class whose module has the step itself; platforms derive their runners from it."""
    return next(base for base in kind.__mro__ if "execute_model" in vars(base))


@contextmanager
def _step(switches: Mapping[str, Any]) -> Iterator[None]:
    token = _switches.set(switches)
    try:
        yield
    finally:
        _switches.reset(token)


def _let_steps_choose(home: ModuleType, name: str) -> None:
    function = getattr(home, name)
    if getattr(function, "insitu", False):
        return
    signature = inspect.signature(function)

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        asked = _switches.get()
        switches = {key: value for key, value in asked.items() if key in signature.parameters} if asked else asked
        if not switches:
            return function(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        call.arguments.update(switches)
        return function(*call.args, **call.kwargs)

    wrapper.insitu = True  # type: ignore[attr-defined]
    setattr(home, name, wrapper)
