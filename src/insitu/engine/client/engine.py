"""The engine as its client sees it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm import LLM, RequestOutput, SamplingParams
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest

from insitu.block import ArgumentError, EngineError, Lost, RequestError
from insitu.block.tracebacks import user_frame
from insitu.engine.channel import Channel
from insitu.engine.client.launch import free_engines, shut_down
from insitu.engine.client.loop import EngineLoop, FailedStepError, Request
from insitu.engine.client.prompts import Limits, as_prompt, require_room
from insitu.engine.client.sampling import certain_length, check_sampling, sampling_params
from insitu.engine.job import BY_BLOCK, Job, tagged
from insitu.engine.lora import require_applied
from insitu.engine.worker.host import Stats
from insitu.run import Home, Names, Outcome
from insitu.tree import Listing, Outline, Place

_ABORTED = "the request was aborted before it ended"


@dataclass(frozen=True)
class Prepared:
    """A prompt and its sampling settings, checked before anything runs."""

    prompt: dict[str, Any]
    params: SamplingParams
    lora: Any = None


@dataclass
class Result:
    """What a traced request left: an outcome for each of its sequences, and vLLM's own output."""

    outcomes: list[Outcome] = field(default_factory=list)
    output: Any = None

    @property
    def error(self) -> BaseException | None:
        return next((outcome.error for outcome in self.outcomes if outcome.error is not None), None)

    @property
    def lost(self) -> list[Lost]:
        return [each for outcome in self.outcomes for each in outcome.lost]

    @property
    def saves(self) -> dict[str, Any]:
        """Saved values by name; where the request has several sequences, lists of them."""
        if len(self.outcomes) == 1:
            return self.outcomes[0].saves
        names = dict.fromkeys(name for outcome in self.outcomes for name in outcome.saves)
        return {name: [outcome.saves.get(name) for outcome in self.outcomes] for name in names}

    def share(self) -> None:
        """Gives each completion the saves of its own sequence, also where a block has saved the output."""
        saved = (value for outcome in self.outcomes for value in outcome.saves.values())
        for output in (self.output, *(value for value in saved if isinstance(value, RequestOutput))):
            for completion, outcome in zip(output.outputs, self.outcomes, strict=False):
                vars(completion)["saves"] = _without_outputs(outcome.saves)

    def bound(self, name: str) -> dict[str, Any]:
        """The name with what the block bound to it, saved or not, if it was asked to export it."""
        bound = self.outcomes[0].bound if self.outcomes else {}
        return {name: bound[name]} if name in bound else {}

    @property
    def returned(self) -> Any:
        values = [outcome.returned for outcome in self.outcomes]
        return values[0] if len(values) == 1 else values


class Engine:
    """A vLLM engine and the channel to the workers that run its model."""

    def __init__(self, llm: LLM, channel: Channel, owner: object) -> None:
        self.llm = llm
        self.owner = owner
        self._channel = channel
        self.outline: Outline
        self.layers: int
        self.outline, self.layers = channel.call("insitu_outline")
        config = llm.llm_engine.vllm_config
        self._limits = _limits(config)
        self._speculative = config.speculative_config is not None
        self._loop = EngineLoop(llm)
        self._failure: BaseException | None = None
        self._closed = False
        self._adapters: set[tuple[int, str]] = set()

    @property
    def tokenizer(self) -> Any:
        if self.llm.llm_engine.tokenizer is None:
            raise EngineError("this engine was built with skip_tokenizer_init: give prompts as token ids")
        return self.llm.get_tokenizer()

    def in_flight(self) -> int:
        return self._channel.call("insitu_in_flight")

    def stats(self) -> Stats:
        return self._channel.call("insitu_stats")

    def taps(self) -> dict[Place, bool]:
        """The places that have taps, and whether any forward has come by."""
        return self._channel.call("insitu_taps")

    def use_taps(self, use: bool) -> None:
        """Whether blocks are served at taps; if not, by eager steps there too."""
        self._channel.call("insitu_use_taps", use)

    def operations(self, path: str, op: str) -> Listing:
        """The text of a module's forward, or of what an operation in it calls."""
        return self._channel.call("insitu_operations", path, op)

    def names(self) -> Names:
        """The standard names of the model, in the order of its forward."""
        return self._channel.call("insitu_names")

    def check(self, settings: Mapping[str, Any]) -> None:
        check_sampling(settings)

    def prepare(self, prompt: Any, settings: Mapping[str, Any]) -> Prepared:
        if self._speculative:
            raise RequestError(
                "this engine decodes speculatively: a step computes rows of tokens that may be thrown away, which "
                "a block can't be shown yet. Load the model without speculative_config to trace it"
            )
        check_sampling(settings)
        params = sampling_params(settings)
        lora = settings.get("lora_request")
        if lora is not None:
            self._require_applied(lora)
        given = as_prompt(prompt, lambda: self.tokenizer, self._limits)
        require_room(given, params.max_tokens, self._limits)
        return Prepared(given, params, lora)

    def _require_applied(self, lora: LoRARequest) -> None:
        asked = (lora.lora_int_id, lora.lora_path)
        if asked in self._adapters and not lora.load_inplace:
            return
        fit = self._channel.call("insitu_fit", lora)
        if fit is None:
            raise ArgumentError(
                "lora_request: this engine has no room for adapters; load the model with enable_lora=True"
            )
        if said := require_applied(lora, fit):
            frame = user_frame()
            warnings.warn_explicit(said, UserWarning, frame.f_code.co_filename, frame.f_lineno)
        self._adapters.add(asked)

    def run(self, work: Sequence[tuple[Prepared, Job]]) -> list[Result]:
        """Runs the jobs beside their prompts, all submitted together; returns when all have ended."""
        self._require_alive()
        with self._loop.turn:
            return self._run(work)

    def _run(self, work: Sequence[tuple[Prepared, Job]]) -> list[Result]:
        results: dict[str, Result] = {}

        def finished(outputs: Mapping[str, Any]) -> None:
            for output in outputs.values():
                for completion in output.outputs:
                    if completion.stop_reason == BY_BLOCK:
                        completion.finish_reason = "stop"
            outcomes = self._channel.call("insitu_collect", dict(outputs), jobs=list(outputs))
            for job, output in outputs.items():
                results[job] = Result(outcomes[job], output)
                results[job].share()

        for prepared, job in work:
            job.length = certain_length(prepared.params)
            job.owner = self.owner
        self._require_alive()
        jobs = [job for _, job in work]
        self._channel.submit(jobs)
        try:
            self._loop.run([_request(prepared, job) for prepared, job in work], finished)
        except FailedStepError as failure:
            self._failure = failure.__cause__
            self._require_alive()
        finally:
            lost = [job.id for job in jobs if job.id not in results]
            self._channel.call("insitu_drop", lost, jobs=lost)
        self._channel.settle()
        return [results.get(job.id) or self.refused(RequestError(_ABORTED)) for _, job in work]

    def _require_alive(self) -> None:
        """A step that broke off has left the caches of all its requests half written."""
        if self._closed:
            raise EngineError("the model was closed before this trace ran; make a new one")
        if self._failure is not None:
            kind = "a device-side failure" if "CUDA" in str(self._failure) else "an error outside any block"
            raise EngineError(
                f"the engine failed in a step, by {kind}, and can't be used any more; make a new one. "
                f"{type(self._failure).__name__}: {self._failure}"
            ) from self._failure

    def refused(self, error: BaseException) -> Result:
        """The result of a request that did not run."""
        return Result([Outcome(error=error)])

    def bring_home(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values as they leave the engine: ordinary tensors on the CPU."""
        home = Home()
        return {name: home.bring(value, f"`{name}`") for name, value in values.items()}

    def close(self) -> None:
        self._closed = True
        shut_down(self.llm)
        self._channel.close()
        del self.llm, self._loop, self._channel
        free_engines()


def _without_outputs(saves: Mapping[str, Any]) -> dict[str, Any]:
    """Without the output itself, which would then hold itself."""
    return {name: value for name, value in saves.items() if not isinstance(value, RequestOutput)}


def _limits(config: VllmConfig) -> Limits:
    scheduler = config.scheduler_config
    steps = {"max_num_batched_tokens": scheduler.max_num_batched_tokens}
    if scheduler.long_prefill_token_threshold > 0:
        steps["long_prefill_token_threshold"] = scheduler.long_prefill_token_threshold
    setting = min(steps, key=lambda name: steps[name])
    model = config.model_config
    return Limits(model.max_model_len, steps[setting], model.get_vocab_size(), setting, _cache_tokens(config))


def _cache_tokens(config: VllmConfig) -> int:
    """How many tokens of one request the KV cache has room for: of all blocks, one is vLLM's own."""
    cache, model = config.cache_config, config.model_config
    if not cache.num_gpu_blocks or model.is_hybrid or model.is_attention_free or model.get_sliding_window():
        return model.max_model_len  # blocks of other kinds, or that are used again
    return min(model.max_model_len, (cache.num_gpu_blocks - 1) * cache.block_size)


def _request(prepared: Prepared, job: Job) -> Request:
    params = prepared.params
    params.skip_clone = True  # they are this request's alone
    params.extra_args = {**(params.extra_args or {}), **tagged(job.id)}
    # All rows are computed, also those that another sequence of the same request has just left in the
    # cache; and under a salt of its own, what the block edits is served to nobody else.
    params.skip_reading_prefix_cache = True
    salt = "-".join(filter(None, (prepared.prompt.get("cache_salt"), job.id)))
    return Request(job.id, {**prepared.prompt, "cache_salt": salt}, params, prepared.lora)
