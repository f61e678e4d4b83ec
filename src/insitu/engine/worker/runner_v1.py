"""vLLM's V1 model runner; the CPU's runner is one too."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context

from insitu.engine.taps.install import without_one_graph
from insitu.engine.worker.adapter import Adapter, Method
from insitu.run import BlockRun, Rows


class V1Adapter(Adapter):
    """V1 settles the order of its batch inside ``execute_model``, so rows are read no earlier than in
    ``_model_forward``."""

    METHODS: ClassVar[tuple[str, ...]] = (
        "_determine_batch_execution_and_padding",
        "_model_forward",
        "_sample",
        "sample_tokens",
    )

    MODEL_METHODS: ClassVar[tuple[str, ...]] = ("compute_logits", "embed_input_ids")

    scored: torch.Tensor | None

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._scheduled: dict[str, int] = {}
        self._embedded_ahead = False

    def order(self) -> list[str]:
        return self.runner.input_batch.req_ids

    def execute_model(self, original: Method, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        self.begin_here(scheduled)
        if not self.stands_in:
            return original(scheduled, *args, **kwargs)
        self._scheduled = scheduled.num_scheduled_tokens
        self._embedded_ahead = False
        try:
            output = original(scheduled, *args, **kwargs)
        except BaseException as error:
            self.fail_forward(error)
            raise
        finally:
            self._scheduled = {}
            self.interleaver.close()
        self.end_forward()
        return output

    def embed_input_ids(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        """Where prompts may hold images or embeddings, vLLM embeds tokens ahead of the forward."""
        if not self.waits_in_forward or not self._scheduled or self._embedded_ahead:
            return original(*args, **kwargs)
        self._embedded_ahead = True
        self.interleaver.open(self._embedded_rows())
        with self.interleaver.inside(self.interleaver.anatomy.embeds):
            return original(*args, **kwargs)

    def _embedded_rows(self) -> dict[BlockRun, Rows]:
        """The runs' rows among the tokens that are embedded; none for prompts that are given as embeddings."""
        counts = dict(self._scheduled)
        if self.runner.enable_prompt_embeds and not self.runner.supports_mm_inputs:
            are_ids, start = self.runner.is_token_ids.np, 0
            for request in self.order():
                stop = start + counts[request]
                counts[request], start = int(are_ids[start:stop].sum()), stop
        rows = self.token_rows(self.order(), counts, sum(counts.values()))
        return {run: mine for run, mine in rows.items() if mine.stop > mine.start}

    def _determine_batch_execution_and_padding(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        if self.waits_in_forward:
            kwargs["force_eager"] = True
        elif self.tapped and not self.interleaver.one_graph:
            kwargs.update(without_one_graph(self.runner.vllm_config, {"use_cascade_attn": True}, {"force_eager": True}))
        return original(*args, **kwargs)

    def _model_forward(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        if not self.waits_in_forward and not self.tapped:
            return original(*args, **kwargs)
        rows = self.token_rows(self.order(), self._scheduled, _rows_in(kwargs))
        if self.tapped:
            self.at_taps.open_compiled(rows, self.spans)
            output = original(*args, **kwargs)
            if not self.at_taps.after_compiled():
                return output
            self.count_again()
        context = get_forward_context()
        context.skip_compiled, context.cudagraph_runtime_mode = True, CUDAGraphMode.NONE
        if self._embedded_ahead:
            self.interleaver.rows = rows
        else:
            self._embedded_ahead = True  # from here on a model that embeds does so inside
            self.interleaver.open(rows)
        with self.eager_kernels():
            return original(*args, **kwargs)

    def _sample(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        self.scored, logits = None, kwargs.get("logits", args[0] if args else None)
        if logits is not None and self.traced and self._scores_are_asked_for():
            logits = logits.clone()  # sampling works in them
        output = original(*args, **kwargs)
        if self.traced:
            self.serve_samples(output, logits)
        return output

    def _scores_are_asked_for(self) -> bool:
        about = self.runner.input_batch.sampling_metadata
        return about.max_num_logprobs is not None or bool(getattr(about, "logprob_token_ids", None))

    def sample_tokens(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        self.begin_sampling()
        output = original(*args, **kwargs)
        # Under asynchronous scheduling the output itself is still to come.
        self.mark_ended(getattr(output, "_model_runner_output", output))
        self.use_wait(output)
        return output


def _rows_in(kwargs: dict[str, Any]) -> int:
    """The length of the token axis that the forward runs on, padding included."""
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(kwargs.get(name), torch.Tensor):
            return kwargs[name].shape[0]
    return kwargs["positions"].shape[-1]
