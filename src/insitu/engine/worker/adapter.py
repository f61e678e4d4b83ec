"""What every model runner's adapter does: who begins in a step, where its rows are, its logits and its ids.

What differs between the runners is in ``runner_v1`` and ``runner_v2``, a few short methods each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
from vllm.forward_context import is_forward_context_available, set_forward_context
from vllm.v1.outputs import AsyncModelRunnerOutput

from insitu.block import RequestError
from insitu.engine.lora import Loras
from insitu.engine.tag import tag_of
from insitu.engine.worker.following import FollowingHost
from insitu.engine.worker.host import Host, New
from insitu.engine.worker.kernels import EagerKernels
from insitu.engine.worker.logprobs import rescored
from insitu.engine.worker.ranks import interleaver_of
from insitu.run import Interleaver, Rows
from insitu.run.parallel import Follower
from insitu.run.spanning import Spanning
from insitu.run.stage_follower import StageFollower
from insitu.run.stage_leader import StageLeader
from insitu.run.tapped import TappedInterleaver
from insitu.run.tapped_ranks import TappedFollower
from insitu.run.taps import Spans

Method = Callable[..., Any]


class Adapter:
    """Drives a host from one model runner, by standing in for methods of that instance: for ``execute_model``
    always, and for ``METHODS`` and the model's ``MODEL_METHODS`` in steps in which the host has anybody's blocks.

    Each is replaced by the adapter's method of the same name, which gets the original first.
    """

    METHODS: ClassVar[tuple[str, ...]] = ()
    MODEL_METHODS: ClassVar[tuple[str, ...]] = ("compute_logits",)

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        model = runner.get_model()
        safe_ids = min(runner.model_config.get_vocab_size(), runner.model_config.max_model_len)
        self.interleaver: Interleaver = interleaver_of(runner, model, model.compute_logits, safe_ids)
        one = self.interleaver
        self.host: Host | FollowingHost = (
            FollowingHost(one) if isinstance(one, (Follower, StageFollower)) else Host(one)
        )
        self.loras: Loras | None = Loras(runner.lora_manager) if getattr(runner, "lora_manager", None) else None
        if self.loras and isinstance(one, Spanning):
            one.adaptable = self.loras.known
        self.interleaver.calls.beside = self._as_in_forward
        self._kernels = EagerKernels(model)
        self.runs: dict[str, list[Any]] = {}
        self.traced: bool = False
        """Whether blocks go on beside requests of this step, one each (``runs``) or one for many."""
        self.waits_in_forward: bool = False
        self.tapped: bool = False
        self._expects_logits = False
        self._for_many = False
        self._ends_early = type(one) is Interleaver
        """Whether a step is vLLM's alone from where the last of its blocks has ended."""
        self.spans: Spans = {}
        """The rows of the requests, as ``token_rows`` found them."""
        self._known_rows: dict[int, tuple[list[str], dict[str, list[Any]], Any, dict[Any, Rows], Spans]] = {}
        self.scored: torch.Tensor | None = None
        """This step's logits as sampling gets them."""
        self._in_traced_steps = [_StandIn(model, name, getattr(self, name)) for name in self.MODEL_METHODS]
        self._in_traced_steps += [_StandIn(runner, name, getattr(self, name)) for name in self.METHODS]
        self.stands_in: bool = False
        _StandIn(runner, "execute_model", self.execute_model).put()

    @contextmanager
    def _as_in_forward(self, given: Any) -> Iterator[None]:
        """What a module that a block calls runs in, also where no forward is under way; experts ask for that."""
        config = self.runner.vllm_config
        around = nullcontext() if is_forward_context_available() else set_forward_context(None, config)
        with around, self.loras.beside(given) if self.loras else nullcontext():
            yield

    @classmethod
    def fits(cls, runner: Any) -> bool:
        """Whether ``runner`` is of the kind that this adapter knows."""
        return all(hasattr(runner, name) for name in ("execute_model", *cls.METHODS))

    def execute_model(self, original: Method, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def begin(self, scheduled: Any) -> None:
        """Takes in what vLLM's scheduler says of this step, and runs blocks up to where they wait."""
        self._admit(scheduled)
        if self.stands_in == self.host.is_idle:
            self._turn()
        if not self.stands_in:  # the step is vLLM's alone
            self.host.plain_steps += bool(scheduled.total_num_scheduled_tokens)
            return
        self.host.preempted(scheduled.preempted_req_ids or ())
        self.host.preempted(scheduled.scheduled_cached_reqs.resumed_req_ids)
        self.host.begin()
        self.runs = self.host.runs(scheduled.num_scheduled_tokens)
        leaders = self.host.company.leaders(scheduled.num_scheduled_tokens)
        self.waits_in_forward = False
        self.traced, self._for_many = bool(self.runs or leaders), bool(leaders)
        if self.traced:
            self.host.tell_left()
            self.waits_in_forward = self.interleaver.begin(chain(chain.from_iterable(self.runs.values()), leaders))
            self.host.leave_out()
            self.runs = self.host.apart(self.runs)
        else:
            self.interleaver.idle()
        self._expects_logits = self.traced
        self.tapped = self.traced and self.interleaver.tapped
        self.host.eager_steps += self.waits_in_forward
        self.host.tapped_steps += self.tapped
        plain = not self.waits_in_forward and not self.tapped
        self.host.plain_steps += bool(scheduled.total_num_scheduled_tokens) and plain

    def _turn(self) -> None:
        self.stands_in = not self.stands_in
        for each in self._in_traced_steps:
            (each.put if self.stands_in else each.take_off)()
        if not self.stands_in:
            self.runs, self.traced, self.waits_in_forward, self.tapped = {}, False, False, False
            self.interleaver.idle()

    def begin_here(self, scheduled: Any) -> None:
        """A later stage has begun already, before it waited for what the one before it computes."""
        if not isinstance(self.interleaver, StageFollower):
            self.begin(scheduled)

    def end_forward(self) -> None:
        """This rank's forward is over; of the first of several stages, those of the others begin."""
        if not isinstance(leader := self.interleaver, StageLeader) or not self.traced:
            return
        watched = leader.hand_over(lambda: self.host.after_step(self.runs))
        if watched and not self.waits_in_forward:
            self.host.eager_steps += 1
            self.host.plain_steps -= 1

    def fail_forward(self, error: BaseException) -> None:
        if isinstance(leader := self.interleaver, StageLeader) and self.traced:
            leader.fail(error)

    def begin_sampling(self) -> None:
        """The first of several stages serves the others, the last of which samples."""
        if isinstance(leader := self.interleaver, StageLeader) and self.traced:
            leader.serve(lambda: self.host.after_step(self.runs))

    @property
    def at_taps(self) -> TappedInterleaver | TappedFollower:
        """The interleaver, in a step that is ``tapped``."""
        assert isinstance(self.interleaver, (TappedInterleaver, TappedFollower))
        return self.interleaver

    def eager_kernels(self) -> AbstractContextManager[None]:
        """To be open in an eager step's forward; operations of a module's own code are watched where they are."""
        watched = any(run.names_source for runs in self.runs.values() for run in runs)
        return nullcontext() if watched else self._kernels.used()

    def count_again(self) -> None:
        """A tapped step came to need an eager forward after all."""
        self.host.eager_steps += 1

    def _admit(self, scheduled: Any) -> None:
        for new in scheduled.scheduled_new_reqs:
            if tag := tag_of(new.sampling_params):
                tokens = scheduled.num_scheduled_tokens[new.req_id]
                length, ids = _prompt_length(new), new.prompt_token_ids
                ends, done = self._most_steps(new, length), new.num_computed_tokens
                self.host.admit(New(new.req_id, tag, done, tokens, length, ids, new.lora_request, ends))

    def _most_steps(self, new: Any, length: int) -> int:
        """A bound on the steps of a request whose prompt, of this length, is computed whole."""
        room = self.runner.model_config.max_model_len - length
        return max(1, min(new.sampling_params.max_tokens or room, room))

    def token_rows(self, order: Sequence[str], counts: Mapping[str, int], total: int) -> dict[Any, Rows]:
        """The runs' rows in a forward over ``total`` tokens, padding included."""
        if set(counts.values()) == {1}:
            return self.request_rows(order, total)
        rows: dict[Any, Rows] = {}
        spans: dict[str, tuple[int, int]] = {}
        start = 0
        for request in order:
            stop = start + counts[request]
            for run in self.runs.get(request, ()):
                rows[run] = Rows(start, stop, total)
            spans[request] = start, stop
            start = stop
        self.host.company.settle(rows, spans, total)
        self.spans = spans
        return rows

    def request_rows(self, order: Sequence[str], total: int) -> dict[Any, Rows]:
        """The runs' rows where there is one for each request; the same object as before if they are the same."""
        known, company = self._known_rows.get(total), self.host.company
        if known is None or known[0] != order or known[1] != self.runs or not company.is_as(known[2]):
            found = ((run, i) for i, request in enumerate(order) for run in self.runs.get(request, ()))
            if len(self._known_rows) > 1:
                self._known_rows.clear()
            rows = {run: Rows(i, i + 1, total) for run, i in found}
            spans = {request: (i, i + 1) for i, request in enumerate(order)}
            settled = company.settle(rows, spans, total)
            known = self._known_rows[total] = (list(order), self.runs, settled, rows, spans)
        self.spans = known[4]
        return known[3]

    def order(self) -> Sequence[str]:
        """The requests of this step in the order of their rows, known once the forward begins."""
        raise NotImplementedError

    def compute_logits(self, original: Method, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self._expects_logits:
            # Prompt log-probabilities ask for logits too, after the step's own and of other rows.
            return original(hidden, *args, **kwargs)
        self._expects_logits = False
        if self._is_over():
            return original(hidden, *args, **kwargs)
        self.interleaver.rows = self.request_rows(self.order(), hidden.shape[0])
        logits = original(hidden, *args, **kwargs)
        self.scored = logits if logits is None else self.interleaver.logits(logits)
        return self.scored

    def _is_over(self) -> bool:
        if not self._ends_early or self._for_many:
            return False
        return self.interleaver.is_over(chain.from_iterable(self.runs.values()))

    def serve_samples(self, sampled: Any, logits: torch.Tensor | None) -> None:
        """Serves the ids of vLLM's ``SamplerOutput``, whose log-probabilities were made of ``logits``."""
        if not self._is_over():
            self._serve_samples(sampled, logits)
        self.interleaver.over()

    def _serve_samples(self, sampled: Any, logits: torch.Tensor | None) -> None:
        ids, scores = sampled.sampled_token_ids, sampled.logprobs_tensors
        drawn = None if scores is None or logits is None else ids.clone()
        self.interleaver.samples(ids)
        if drawn is None or logits is None:
            return
        mode = self.runner.model_config.logprobs_mode
        wrong = set(rescored(scores, drawn, ids, logits, mode))
        for run, rows in self.interleaver.rows.items():
            if rows.start in wrong:
                run.refuse(
                    RequestError(
                        f"`model.samples` can't be written with logprobs asked for and logprobs_mode={mode!r}, for "
                        f"what that mode makes of the id written is not known: load the model with raw_logprobs"
                    )
                )

    def use_wait(self, output: Any) -> None:
        """While somebody waits for the device to give this step's output, blocks may run."""
        interleaver = self.interleaver
        if not self.traced or isinstance(interleaver, Follower) or not isinstance(output, AsyncModelRunnerOutput):
            return
        done, get_output = torch.cuda.Event(), output.get_output
        done.record()

        def work_and_get() -> Any:
            interleaver.work_ahead(lambda: not done.query())
            return get_output()

        output.get_output = work_and_get  # type: ignore[method-assign]

    def mark_ended(self, output: Any) -> None:
        """Tells the scheduler (``TracedScheduler.update_from_output``) which requests end here, which it may preempt
        from now on, and of which from now on memory may hold what is not finite (see ``Leftover``)."""
        if self.traced and not isinstance(self.interleaver, StageLeader):
            output.insitu_ended, output.insitu_released = self.host.after_step(self.runs)
            if self.runner.device.type == "cpu":
                output.insitu_edited = self.host.newly_edited(self.runs)


class _StandIn:
    """What is called in place of a method of one object, and gets the original first."""

    def __init__(self, owner: Any, name: str, replacement: Method) -> None:
        self._owner = owner
        self._name = name
        self._replacement = replacement
        self._before: Method | None = None

    def put(self) -> None:
        names = vars(self._owner)
        self._before = names.get(self._name)
        names[self._name] = partial(self._replacement, getattr(self._owner, self._name))

    def take_off(self) -> None:
        if self._before is None:
            del vars(self._owner)[self._name]
        else:
            vars(self._owner)[self._name] = self._before


def _prompt_length(new: Any) -> int:
    ids = new.prompt_token_ids
    return len(ids) if ids is not None else len(new.prompt_embeds)
