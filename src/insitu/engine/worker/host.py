"""The worker's table of jobs and runs. One host beside one model runner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from insitu.block import RequestError
from insitu.engine.job import Execution, Job
from insitu.run import BlockRun, Interleaver, Outcome, outcome_of
from insitu.tree import RESULT


@dataclass
class _Live:
    run: BlockRun
    execution: Execution
    request: str


@dataclass(frozen=True)
class Stats:
    """Counts since the engine started. ``eager_steps``: a block waited for a module without a tap;
    ``tapped_steps``: all that waited for modules were served at taps; ``plain_steps``: none waited for one,
    so the step ran as vLLM would run it. A tapped step that had to be run again eagerly counts as both.
    ``tap_bytes``: what the taps hold on the device."""

    eager_steps: int = 0
    plain_steps: int = 0
    tapped_steps: int = 0
    tap_bytes: int = 0


@dataclass
class Host:
    """Jobs wait here for their requests; each becomes a run when its request is first scheduled."""

    interleaver: Interleaver
    jobs: dict[str, Job] = field(default_factory=dict)
    eager_steps: int = 0
    plain_steps: int = 0
    tapped_steps: int = 0
    _live: dict[str, _Live] = field(default_factory=dict)
    _by_job: dict[str, list[_Live]] = field(default_factory=dict)

    # -- the client's side ----------------------------------------------------------------

    def submit(self, jobs: Iterable[Job]) -> None:
        self.jobs.update((job.id, job) for job in jobs)

    def collect(self, results: Mapping[str, Any]) -> dict[str, list[Outcome]]:
        """Ends the jobs named in ``results``, each with its request's output, and forgets them."""
        outcomes: dict[str, list[Outcome]] = {}
        for job, result in results.items():
            outcomes[job] = []
            for live in self._by_job.get(job, ()):
                self.interleaver.finish(live.run, result)
                ran, about = live.execution, self.jobs[job]
                lost = ran.lost(about.exports | about.shared) if live.run.error is None else []
                outcomes[job].append(outcome_of(live.run, ran.saved(), ran.bound(about.exports), lost))
            self._forget(job)
        return outcomes

    def drop(self, jobs: Iterable[str]) -> None:
        """Ends jobs whose requests are gone, without a result."""
        for job in jobs:
            for live in self._by_job.get(job, ()):
                live.run.kill()
            self._forget(job)

    def in_flight(self) -> int:
        return len(self.jobs)

    def _forget(self, job: str) -> None:
        self.jobs.pop(job, None)
        for live in self._by_job.pop(job, ()):
            self._live.pop(live.request, None)

    # -- the runner's side ----------------------------------------------------------------

    def admit(
        self,
        request: str,
        job: str,
        computed: int,
        scheduled: int,
        prompt: int,
        ids: Sequence[int] | None,
        adapter: Any = None,
    ) -> None:
        """A request appears in a step for the first time, with ``scheduled`` of the ``prompt`` tokens of its
        prompt, whose ``ids`` are known unless it is given by embeddings, and the LoRA ``adapter`` that it asks for."""
        if job not in self.jobs or request in self._live:
            return  # the V2 runner announces resumed requests once more
        execution = self.jobs[job].execution()
        live = _Live(BlockRun(execution, self.interleaver, self.jobs[job].length), execution, request)
        live.run.prompt, live.run.owner, live.run.request = ids, self.jobs[job].owner, request
        live.run.adapter = adapter
        self._live[request] = live
        self._by_job.setdefault(job, []).append(live)
        if computed or scheduled != prompt:
            live.run.throw(
                RequestError(
                    f"the block must see its prompt whole, but this step computes tokens {computed} to "
                    f"{computed + scheduled} of {prompt}: raise max_num_batched_tokens to at least {prompt}"
                )
            )

    def preempted(self, requests: Iterable[str]) -> None:
        """vLLM takes these requests' memory away; resuming computes their steps a second time.

        Only a block that has read all that it reads, records nothing and edited nothing that would be lost
        can bear that.
        """
        for request in requests:
            live = self._live.get(request)
            if live is None or _bears_preemption(live.run):
                continue
            live.run.refuse(
                RequestError(
                    "this request was preempted (by reset_prefix_cache with reset_running_requests, or because the KV "
                    "cache is full), and a block can't be run twice: trace again, with more memory for the KV cache "
                    "if that was full"
                )
            )

    def runs(self, requests: Iterable[str]) -> dict[str, BlockRun]:
        """The runs that go on beside these requests, by request."""
        return {request: self._live[request].run for request in requests if request in self._live}

    def released(self, requests: Iterable[str]) -> frozenset[str]:
        """Of these requests, those that may be preempted from now on."""
        return frozenset(
            request for request in requests if (live := self._live.get(request)) and _bears_preemption(live.run)
        )

    def ended(self, requests: Iterable[str]) -> frozenset[str]:
        """Of these requests, those that end here: their block failed, or called ``tracer.stop()``."""
        return frozenset(request for request in requests if (live := self._live.get(request)) and _over(live.run))


def _bears_preemption(run: BlockRun) -> bool:
    return not run.edited and not run.recorders and (run.done or run.waiting == RESULT)


def _over(run: BlockRun) -> bool:
    return run.stopping or (run.done and run.error is not None)
