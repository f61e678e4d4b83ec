"""The engine as its client sees it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import copy
from dataclasses import replace
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest

from insitu.block import ArgumentError, EngineError, PromptError, RequestError
from insitu.block.tracebacks import user_frame
from insitu.engine.channel import Channel, Direct, Shipment
from insitu.engine.client.edit import Edit
from insitu.engine.client.installed import Installed
from insitu.engine.client.launch import free_engines, shut_down
from insitu.engine.client.limits import Limits, limits_of
from insitu.engine.client.loop import EngineLoop, FailedStepError, Request
from insitu.engine.client.progress import advancing
from insitu.engine.client.prompts import as_prompt, checked, is_short_text, is_text, require_room, tokenise
from insitu.engine.client.result import Prepared, Result
from insitu.engine.client.sampling import Templates, certain_length, check_sampling
from insitu.engine.job import Job
from insitu.engine.lora import Fit, require_applied
from insitu.engine.tag import Tag
from insitu.run import Home, Outcome
from insitu.tree import Named, Outline

_SPECULATIVE = (
    "this engine decodes speculatively: a step computes rows of tokens that may be thrown away, which a block can't "
    "be shown yet."
)
ABORTED = "the request was aborted before it ended"


class EngineClient:
    """A vLLM engine and the channel to the workers that run its model, whoever waits for them.

    What asks the workers returns what the channel's ``call`` returns: an answer, or what is to be awaited for one.
    """

    def __init__(self, llm: Any, config: VllmConfig, channel: Any, owner: object) -> None:
        self.llm = llm
        self.config = config
        self.owner = owner
        self.outline: Outline
        self.layers: int
        self.installed: Installed
        self._channel = channel
        self._limits = limits_of(config)
        self._plain_limits = replace(self._limits, max_step_tokens=sys.maxsize)
        self._speculative = config.speculative_config is not None
        self._failure: BaseException | None = None
        self._closed = False
        self._adapters: set[tuple[int, str]] = set()
        self._checked: tuple[Mapping[str, Any], SamplingParams] | None = None
        self._templates = Templates()

    @property
    def tokenizer(self) -> Any:
        raise NotImplementedError

    def in_flight(self) -> Any:
        return self._channel.call("insitu_in_flight")

    def stats(self) -> Any:
        return self._channel.call("insitu_stats")

    def taps(self) -> Any:
        """The places that have taps, and whether any forward has come by."""
        return self._channel.call("insitu_taps")

    def use_taps(self, use: bool) -> Any:
        """Whether blocks are served at taps; if not, by eager steps there too."""
        return self._channel.call("insitu_use_taps", use)

    def operations(self, path: str, op: str) -> Any:
        """The text of a module's forward, or of what an operation in it calls."""
        return self._channel.call("insitu_operations", path, op)

    def names(self) -> Any:
        """The standard names of the model, in the order of its forward."""
        return self._channel.call("insitu_names")

    def visits(self, places: Sequence[Named]) -> Any:
        """When the forward comes to each of these places, as far as one has been watched."""
        return self._channel.call("insitu_visits", list(places))

    def check(self, settings: Mapping[str, Any], tenant: str = "") -> None:
        if self._templates.of(settings) is None:
            check_sampling(settings, self._limits.vocab_size)
        self.installed.chosen(settings.get("edits"), tenant)

    def prepare(self, prompt: Any, settings: Mapping[str, Any], tenant: str = "", later: bool = False) -> Prepared:
        """``later``: a text gets its token ids by ``complete``."""
        self._require_not_speculative()
        return self._with_room(self.prepare_plain(prompt, settings, self._limits, tenant, later))

    def prepare_all(self, prompts: Sequence[Any], settings: Mapping[str, Any]) -> list[Prepared]:
        """As ``prepare`` each of them, in fewer steps."""
        prepared = [self.prepare(prompt, settings, later=len(prompts) > 1 and is_text(prompt)) for prompt in prompts]
        self.complete(prepared)
        return prepared

    def prepare_early(self, prompt: Any, settings: Mapping[str, Any]) -> Prepared:
        """As ``prepare``, without the token ids of what is sure to have room: ``complete`` gives those to many."""
        limits = self._limits
        later = limits.cache_tokens >= limits.max_model_len and is_short_text(prompt, limits)
        return self.prepare(prompt, settings, later=later)

    def complete(self, work: Sequence[Prepared]) -> None:
        """Gives them the token ids that they still lack. Raises ``PromptError`` as ``prepare`` would have."""
        tokenise([one.prompt for one in work], lambda: self.tokenizer, self._limits)
        for one in work:
            self._with_room(one)

    def adopted(self, prompt: Any, params: SamplingParams, lora: Any) -> Prepared:
        """One that vLLM's own server has prepared, to be traced. ``params`` are its alone."""
        self._require_not_speculative()
        if "prompt_token_ids" not in prompt:
            raise PromptError("a block can't see a prompt that has no token ids: prompt embeddings can't be traced")
        return self._with_room(Prepared(checked(prompt, self._limits), params, lora))

    def _require_not_speculative(self) -> None:
        if self._speculative:
            raise RequestError(f"{_SPECULATIVE} Load the model without speculative_config to trace it")

    def _with_room(self, prepared: Prepared) -> Prepared:
        require_room(prepared.prompt, prepared.params.max_tokens, self._limits)
        return prepared

    def prepare_plain(
        self,
        prompt: Any,
        settings: Mapping[str, Any],
        limits: Limits | None = None,
        tenant: str = "",
        later: bool = False,
    ) -> Prepared:
        """One without a block of its own, whose prompt may be longer than a step."""
        params = self._params(settings, tenant)
        limits = limits or self._plain_limits
        given = {"prompt": prompt} if later else as_prompt(prompt, lambda: self.tokenizer, limits)
        return Prepared(given, params, settings.get("lora_request"), tenant)

    def _params(self, settings: Mapping[str, Any], tenant: str) -> SamplingParams:
        """Those of one request. The settings of a trace, which nobody changes, are checked once for all of its."""
        known = self._checked
        if known is None or known[0] is not settings:
            self.check(settings, tenant)
            known = self._checked = (settings, self._templates.of(settings) or self._templates.made(settings))
        return copy(known[1])

    def prepare_edit(self, edit: Edit, job: Job) -> int:
        """The number of a new edit. Raises ``RequestError`` if the engine can't run any."""
        self._require_alive()
        if self._speculative:
            raise RequestError(f"{_SPECULATIVE} Load the model without speculative_config to install edits")
        job.owner = self.owner
        return self.installed.number(edit.name, edit.tenant)

    def refused(self, error: BaseException) -> Result:
        """The result of a request that did not run."""
        return Result([Outcome(error=error)])

    def bring_home(self, values: Mapping[str, Any], keep: bool = False) -> dict[str, Any]:
        """Values as they leave the engine: ordinary tensors on the CPU, or with ``keep`` on the device."""
        if not values:
            return {}
        home = Home(keep=keep)
        return {name: home.bring(value, f"`{name}`") for name, value in values.items()}

    def _is_new(self, lora: LoRARequest | None) -> bool:
        """Whether it is not known yet that the model has what the adapter is for."""
        return lora is not None and (lora.load_inplace or _key(lora) not in self._adapters)

    def _fits(self, lora: LoRARequest, fit: Fit | None) -> None:
        if fit is None:
            raise ArgumentError(
                "lora_request: this engine has no room for adapters; load the model with enable_lora=True"
            )
        if said := require_applied(lora, fit):
            frame = user_frame()
            warnings.warn_explicit(said, UserWarning, frame.f_code.co_filename, frame.f_lineno)
        self._adapters.add(_key(lora))

    def _owned(self, work: Sequence[tuple[Prepared, Job]]) -> list[Job]:
        for prepared, job in work:
            job.length = certain_length(prepared.params)
            job.owner = self.owner
        return [job for _, job in work]

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


class Engine(EngineClient):
    """vLLM's synchronous engine, which is stepped by whoever waits."""

    def __init__(self, llm: LLM, channel: Channel, owner: object) -> None:
        super().__init__(llm, llm.llm_engine.vllm_config, channel, owner)
        outline, layers = channel.call("insitu_outline")
        self.outline: Outline = outline
        self.layers: int = layers
        self.installed: Installed = Installed(llm.llm_engine)
        self._loop = EngineLoop(llm, self.installed.stamp, self._deliver)

    @property
    def tokenizer(self) -> Any:
        if self.llm.llm_engine.tokenizer is None:
            raise no_tokenizer()
        return self.llm.get_tokenizer()

    def prepare(self, prompt: Any, settings: Mapping[str, Any], tenant: str = "", later: bool = False) -> Prepared:
        return self._with_adapter(super().prepare(prompt, settings, tenant, later))

    def keeps(self, keep_on: str | None) -> bool:
        """Whether values are to stay on the engine's device. Raises ``ArgumentError`` where they can't."""
        if keep_on is None:
            return False
        if keep_on != "device":
            raise ArgumentError(
                f"keep_on={keep_on!r:.40}: it is 'device', or left out, and then values come home to the CPU"
            )
        if not isinstance(self._channel, Direct):
            raise ArgumentError(
                "keep_on='device': this model runs in worker processes, and what is on their devices can't be handed "
                "to this process: leave it out, or load the model on one device and without engine='workers'"
            )
        return True

    def _with_adapter(self, prepared: Prepared) -> Prepared:
        if self._is_new(prepared.lora):
            self._fits(prepared.lora, self._channel.call("insitu_fit", prepared.lora))
        return prepared

    def run(self, work: Sequence[tuple[Prepared, Job]], progress: bool = False) -> list[Result]:
        """Runs the jobs beside their prompts, all submitted together; returns when all have ended."""
        self._require_alive()
        with self._loop.turn:
            return self._run(work, progress)

    def _run(self, work: Sequence[tuple[Prepared, Job]], progress: bool) -> list[Result]:
        results: dict[str, Result] = {}

        def finished(outputs: Mapping[str, Any]) -> None:
            outcomes = self._channel.call("insitu_collect", dict(outputs), jobs=list(outputs))
            for job, output in outputs.items():
                results[job] = Result(outcomes[job], output)
                results[job].share()

        jobs = self._owned(work)
        self._require_alive()
        shipment: Shipment | None = self._channel.submit(jobs)
        given_up = shipment
        try:
            self._drive([request_of(prepared, job) for prepared, job in work], finished, progress)
            given_up = None
        finally:
            lost = [job.id for job in jobs if job.id not in results]
            if lost or given_up:
                with nullcontext() if self._failure is None else suppress(EngineError):
                    self._channel.drop(lost, given_up)
        self._channel.settle(shipment)
        return [results.get(job.id) or self.refused(RequestError(ABORTED)) for job in jobs]

    def _drive(
        self, requests: Sequence[Request], finished: Callable[[Mapping[str, Any]], None], progress: bool
    ) -> None:
        try:
            with advancing(len(requests), progress) as advance:
                self._loop.run(requests, finished, advance)
        except FailedStepError as failure:
            self._failure = failure.__cause__
            self._channel.abandon()
            self._require_alive()

    def generate(self, prompts: Sequence[Any], settings: Mapping[str, Any], progress: bool = False) -> list[Any]:
        """Plain requests; their outputs in the order of the prompts, once all have ended."""
        several = len(prompts) > 1
        work = [
            self._with_adapter(self.prepare_plain(each, settings, later=several and is_text(each))) for each in prompts
        ]
        tokenise([one.prompt for one in work], lambda: self.tokenizer, self._plain_limits)
        requests = [Request(str(i), one.prompt, one.params, one.lora) for i, one in enumerate(work)]
        results: dict[str, Any] = {}
        self._require_alive()
        with self._loop.turn:
            self._require_alive()
            self._drive(requests, results.update, progress)
        if len(results) < len(requests):
            raise RequestError(ABORTED)
        return [results[request.job] for request in requests]

    # -- edits ----------------------------------------------------------------------------

    def in_flight(self) -> int:
        with self._loop.turn:
            self._sweep()
            return super().in_flight()

    def install(self, edit: Edit, job: Job) -> None:
        """From now on ``job``'s block runs beside every request."""
        with self._loop.turn:
            number = self.prepare_edit(edit, job)
            self._channel.install(number, job)
            edit.number = number
            self.installed.add(edit)

    def clear(self, edits: Iterable[Edit]) -> None:
        if not self._closed:
            with self._loop.turn:
                self._uninstall(self.installed.remove(edit.number for edit in edits))
                self._sweep()

    def _deliver(self, outputs: Iterable[Any]) -> None:
        """Puts on finished outputs what edits left beside their requests."""
        if ended := self.installed.finished(outputs):
            outcomes = self._channel.call("insitu_collect", ended, jobs=list(ended))
            for group, output in ended.items():
                self.installed.attach(output, outcomes[group])
            self._uninstall(self.installed.forget(ended))
            self._sweep()

    def _sweep(self) -> None:
        """Lets go of what edits hold for requests that were aborted."""
        if gone := self.installed.gone():
            self._channel.drop(gone)
            self._uninstall(self.installed.forget(gone))

    def _uninstall(self, numbers: list[int]) -> None:
        if numbers:
            self._channel.call("insitu_uninstall", numbers)

    def close(self) -> None:
        self._closed = True
        self.installed.remove([edit.number for edit in self.installed])
        shut_down(self.llm)
        self._channel.close()
        del self.llm, self._loop, self._channel
        free_engines()


def no_tokenizer() -> EngineError:
    return EngineError("this engine was built with skip_tokenizer_init: give prompts as token ids")


def _key(lora: LoRARequest) -> tuple[int, str]:
    return lora.lora_int_id, lora.lora_path


def request_of(prepared: Prepared, job: Job) -> Request:
    params = prepared.params
    params.skip_clone = True  # they are this request's alone
    Tag(job.id, tenant=prepared.tenant).put_on(params)
    # All rows are computed, also those that another sequence of the same request has just left in the
    # cache; and under a salt of its own, what the block edits is served to nobody else.
    params.skip_reading_prefix_cache = True
    salt = "-".join(filter(None, (prepared.prompt.get("cache_salt"), job.id)))
    return Request(job.id, {**prepared.prompt, "cache_salt": salt}, params, prepared.lora)
