"""The worker's table of jobs, installed edits and runs. One host beside one model runner."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from insitu.block import FunctionBlock, RequestError
from insitu.engine.job import Execution, Job
from insitu.engine.tag import Tag
from insitu.engine.worker.cohorts import LEAST, Candidate, cohorts_of, grouped
from insitu.engine.worker.company import Company
from insitu.engine.worker.members import Cohort, Member
from insitu.run import BlockRun, Home, Interleaver, Outcome, outcome_of
from insitu.run.parallel import Leader
from insitu.run.posting import Post
from insitu.run.stage_leader import StageLeader
from insitu.run.tapped import TappedInterleaver
from insitu.run.tapped_ranks import TappedLeader
from insitu.tree import RESULT


class New(NamedTuple):
    """A request that appears in a step for the first time, with ``scheduled`` of the ``prompt`` tokens of its prompt
    after ``computed``, whose ``ids`` are known unless it is given by embeddings, and its LoRA ``adapter``. It has no
    more steps than ``ends`` if its prompt is computed whole."""

    request: str
    tag: Tag
    computed: int = 0
    scheduled: int = 0
    prompt: int = 0
    ids: Any = None
    adapter: Any = None
    ends: int = 1


@dataclass(eq=False)
class _Live:
    """One run. ``key``: its job's id, or the group of its request if it is an installed edit's."""

    run: BlockRun
    execution: Execution
    about: Job
    request: str
    key: str
    whole: bool
    edit: int | None = None
    failed_beside: bool = False


@dataclass
class Host:
    """Jobs wait here for their requests, edits run beside all that name them; each becomes a run when such a
    request is first scheduled."""

    interleaver: Interleaver
    jobs: dict[str, Job] = field(default_factory=dict)
    installed: dict[int, Job] = field(default_factory=dict)
    eager_steps: int = 0
    plain_steps: int = 0
    tapped_steps: int = 0
    _live: dict[str, list[_Live]] = field(default_factory=dict)
    _going: dict[str, list[_Live]] = field(default_factory=dict)
    """Of the requests that steps may still concern, but for those that a cohort stands for."""
    _leaving: list[str] = field(default_factory=list)
    """Those of which other ranks do not know yet that steps concern them no more."""
    _edited: set[str] = field(default_factory=set)
    """Those that were said to be edited."""
    _by_key: dict[str, list[_Live]] = field(default_factory=dict)
    _new: dict[str, New] = field(default_factory=dict)
    company: Company = field(default_factory=Company)
    together: bool = field(default_factory=lambda: os.environ.get("INSITU_COHORTS") != "0")
    """Whether blocks that do the same may be run as one."""
    blocks_together: int = 0
    blocks_alone: int = 0

    # -- the client's side ----------------------------------------------------------------

    def submit(self, jobs: Iterable[Job]) -> None:
        self.jobs.update((job.id, job) for job in jobs)

    def install(self, number: int, edit: Job) -> None:
        """From now on it runs beside the requests that name it, before those installed later."""
        self.installed[number] = edit

    def uninstall(self, numbers: Iterable[int]) -> None:
        """To be called once no request that names one of these is still to begin."""
        for number in numbers:
            self.installed.pop(number, None)

    def collect(self, results: Mapping[str, Any]) -> dict[str, list[Outcome]]:
        """Ends the runs of the keys in ``results`` (of jobs, or of groups), each with its request's output, and
        forgets them."""
        outcomes: dict[str, list[Outcome]] = {}
        self._finish_cohorts(results)
        for key, result in results.items():
            ending = self._by_key.get(key, ())
            failed = {live.request for live in ending for each in self._live[live.request] if each.run.error}
            for live in ending:
                live.failed_beside |= live.run.error is None and live.request in failed
                self.interleaver.finish(live.run, result)
        self._send([live for key in results for live in self._by_key.get(key, ())])
        post = Post() if self.interleaver.sender.keeps_whole else None
        for key in results:  # all that are to come home are under way
            outcomes[key] = [self._outcome(live, post) for live in self._by_key.get(key, ())]
            self._forget(key)
        self._clear_if_idle()
        return outcomes

    def _finish_cohorts(self, results: Mapping[str, Any]) -> None:
        ending: dict[Cohort, list[Member]] = {}
        for key in results:
            for live in self._by_key.get(key, ()):
                if isinstance(live.execution, Member) and not live.execution.done:
                    ending.setdefault(live.execution.cohort, []).append(live.execution)
        for cohort, members in ending.items():
            (cohort if len(members) == len(cohort.members) else cohort.part(members)).finish(None)

    def _send(self, lives: Iterable[_Live]) -> None:
        if self.interleaver.sender.in_use:
            going = [live for live in lives if not live.about.keep and not isinstance(live.execution, Member)]
            self.interleaver.sender.send([(live.execution.saved(), live.run.returned) for live in going])

    def _outcome(self, live: _Live, post: Post | None) -> Outcome:
        ran = live.execution
        outcome = ran.outcome(post) if isinstance(ran, Member) else self._outcome_alone(live)
        if live.failed_beside:
            outcome.error = None  # it was cut short, because another block of its request had failed
        outcome.edit = live.edit
        if live.edit is not None and live.request != live.key:
            outcome.sequence = int(live.request.partition("_")[0])  # as vLLM names the sequences of a request
        return outcome

    def _outcome_alone(self, live: _Live) -> Outcome:
        ran, about = live.execution, live.about
        saved = ran.saved()
        lost = ran.lost({*saved, *about.exports, *about.shared}) if live.run.error is None else []
        home = Home(keep=True) if about.keep else Home(self.interleaver.sender)
        return outcome_of(live.run, saved, ran.bound(about.exports), lost, home)

    def drop(self, keys: Iterable[str]) -> None:
        """Ends the runs of requests that are gone, without a result."""
        for key in keys:
            for live in self._by_key.get(key, ()):
                live.run.kill()
            self._forget(key)
        self._clear_if_idle()

    def in_flight(self) -> int:
        return len(self.jobs.keys() | self._by_key.keys())

    @property
    def counts(self) -> tuple[int, int]:
        return self.blocks_together, self.blocks_alone

    def _clear_if_idle(self) -> None:
        if not self._by_key:
            self.company.forget()
            self.interleaver.forget()

    def _forget(self, key: str) -> None:
        self.jobs.pop(key, None)
        for live in self._by_key.pop(key, ()):
            left = self._live[live.request] = [each for each in self._live[live.request] if each is not live]
            cause = live.run.error is not None and not live.failed_beside
            for other in left:
                other.failed_beside |= cause and other.run.error is None
                other.run.beside = [each.run for each in left if each is not other]
            live.run.let_go()
            if left and live.request in self._going:
                self._going[live.request] = left
            else:
                self._going.pop(live.request, None)
            if not left:
                del self._live[live.request]
                self._edited.discard(live.request)

    # -- the runner's side ----------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether there are no blocks that a step could concern."""
        return not self._live and not self._new

    def admit(self, new: New) -> None:
        """A request whose runs begin in this step."""
        if new.request not in self._live:  # the V2 runner announces resumed requests once more
            self._new[new.request] = new

    def begin(self) -> None:
        """Begins the runs of those that were admitted."""
        if not self._new:
            return
        candidates = [self._candidate(new) for new in self._new.values()] if self._may_be_together else []
        for group in grouped(each for each in candidates if each is not None):
            for cohort, part in cohorts_of(group, self.interleaver, partial(self._has_others, group[0].job)):
                self.company.all.append(cohort)
                for one in part:
                    self._join(cohort, self._new.pop(one.about.request), one.job)
        for new in self._new.values():
            self._begin_alone(new)
        self._new.clear()

    @property
    def _may_be_together(self) -> bool:
        room = self.interleaver
        return self.together and len(self._new) >= LEAST and type(room) in _KNOWN and not room.anatomy.batched

    def _has_others(self, job: Job) -> bool:
        if hasattr(job.block, "written"):  # its values came for its trace alone, or for the edit
            beside = [each for each in self.jobs.values() if job.trace and each.trace == job.trace]
            return any(each.block != job.block for each in beside)
        installed = any(edit is not job for edit in self.installed.values())
        return installed or any(each.block != job.block for each in self.jobs.values())

    def _candidate(self, new: New) -> Candidate | None:
        """If one block alone runs beside the request."""
        tag = new.tag
        if new.ids is None or self._hindrance(new) is not None or (tag.job in self.jobs) + len(tag.edits) != 1:
            return None
        job = self.installed[tag.edits[0]] if tag.edits else self.jobs[tag.job or ""]
        if job.keep and self.interleaver.sender.in_use:
            return None
        ends = new.ends if tag.whole else new.ends + _RESUMED
        return Candidate(job, new.scheduled, ends, new)

    def _join(self, cohort: Cohort, new: New, job: Job) -> None:
        member: Any = Member(cohort, new)
        tag = new.tag
        edit = tag.edits[0] if tag.edits else None
        key = tag.job if edit is None else tag.group
        live = _Live(member, member, job, new.request, key or "", tag.whole, edit)
        self._live[new.request] = [live]
        self._by_key.setdefault(live.key, []).append(live)
        self.blocks_together += 1

    def _begin_alone(self, new: New) -> None:
        """Begins the runs beside a request: those of its edits, in their order, and then its own."""
        request, tag = new.request, new.tag
        lives = [self._begun(self.installed.get(number, _NOTHING), tag.group, new, number) for number in tag.edits]
        if tag.job in self.jobs:
            lives.append(self._begun(self.jobs[tag.job], tag.job, new))
            self.blocks_alone += 1
        elif tag.refusal and not lives:
            lives.append(self._begun(_NOTHING, tag.group, new, 0))
        if not lives:
            return
        self._live[request] = self._going[request] = lives
        for order, live in enumerate(lives):
            self._by_key.setdefault(live.key, []).append(live)
            live.run.order, live.run.beside = order, [each.run for each in lives if each is not live]
        error = self._hindrance(new)
        for live in lives:
            if error is not None:
                live.run.throw(error)

    def _begun(self, about: Job, key: str, new: New, edit: int | None = None) -> _Live:
        execution = about.execution()
        run = BlockRun(execution, self.interleaver, about.length)
        run.prompt, run.owner, run.adapter = new.ids, about.owner, new.adapter
        run.request = run_key(new.request, edit)
        return _Live(run, execution, about, new.request, key, new.tag.whole, edit)

    def _hindrance(self, new: New) -> RequestError | None:
        tag = new.tag
        if tag.refusal:
            return RequestError(tag.refusal)
        if not self.installed.keys() >= {*tag.edits}:
            return RequestError("an edit of this request was cleared before the request began")
        if tag.whole and (new.computed or new.scheduled != new.prompt):
            return RequestError(
                f"the block must see its prompt whole, but this step computes tokens {new.computed} to "
                f"{new.computed + new.scheduled} of {new.prompt}: raise max_num_batched_tokens to at least {new.prompt}"
            )
        return None

    def preempted(self, requests: Iterable[str]) -> None:
        """vLLM takes these requests' memory away; resuming computes their steps a second time.

        Only a block that has read all that it reads, records nothing and edited nothing that would be lost
        can bear that, or one that does the same to every row.
        """
        for request in requests:
            for live in self._live.get(request, ()):
                if not _bears_preemption(live):
                    live.run.refuse(
                        RequestError(
                            "this request was preempted (by reset_prefix_cache with reset_running_requests, or because "
                            "the KV cache is full), and a block can't be run twice: trace again, with more memory for "
                            "the KV cache if that was full"
                        )
                    )
                    if isinstance(live.execution, Member):
                        self._out_of_cohort([request])

    def _out_of_cohort(self, requests: Iterable[str]) -> None:
        """The block has ended beside these, and no cohort tells of it any more: each is in its next step by itself,
        without a run, so that it is seen to have settled."""
        self._going.update((request, []) for request in requests)

    def runs(self, scheduled: Mapping[str, int]) -> dict[str, list[BlockRun]]:
        """The runs that go on beside these requests, by request, told how many rows each has in this step."""
        found: dict[str, list[BlockRun]] = {}
        for request, lives in self._going.items():
            if rows := scheduled.get(request):
                found[request] = [live.run for live in lives]
                for live in lives:
                    live.run.rows = rows
        return found

    def tell_left(self) -> None:
        """The step that begins is the last of requests whose blocks have ended, if all ranks are to know."""
        self.interleaver.left, self._leaving = self._leaving, []
        if not self.interleaver.leaves_ended_out:
            self.interleaver.together = self.company.news()

    def leave_out(self) -> None:
        """All ranks know."""
        for request in self.interleaver.left:
            self._going.pop(request, None)

    def apart(self, runs: dict[str, list[BlockRun]]) -> dict[str, list[BlockRun]]:
        """Those of these that no run stands for, as all ranks know by now."""
        return runs

    def after_step(self, runs: Mapping[str, list[BlockRun]]) -> tuple[frozenset[str], frozenset[str]]:
        """Of these requests, those that end here, since a block of theirs failed or called ``tracer.stop()``, and
        those that may be preempted from now on. What blocks that have ended saved is sent to the host."""
        over: set[str] = set()
        released: set[str] = set()
        ended: list[_Live] = []
        settled = [request for request, each in runs.items() if not each or any(map(_is_settled, each))]
        company = self.company.ended
        if not self.interleaver.leaves_ended_out:
            self._out_of_cohort(company)
        for request in [*settled, *company]:
            lives = self._live.get(request, ())
            if any(live.run.stopping or (live.run.done and live.run.error is not None) for live in lives):
                over.add(request)
            if all(map(_bears_preemption, lives)):
                released.add(request)
            if request in self._going and all(live.run.done and not live.run.recorders for live in lives):
                if self.interleaver.leaves_ended_out:
                    self._going.pop(request, None)
                else:
                    self._leaving.append(request)
                ended.extend(lives)
        self._send(ended)
        return frozenset(over), frozenset(released)

    def newly_edited(self, runs: Mapping[str, list[BlockRun]]) -> list[str]:
        """Those of these requests, and of the cohorts in this step, that blocks have edited, each once."""
        alone = [request for request, each in runs.items() if any(run.edited for run in each)]
        new = [request for request in (*alone, *self.company.edited) if request not in self._edited]
        self._edited.update(self._live.keys() & new)
        return new


def run_key(request: str, edit: int | None) -> str:
    """Names one of the runs beside a request."""
    return request if edit is None else f"{request}/{edit}"


def _is_settled(run: BlockRun) -> bool:
    return run.done or run.stopping or run.waiting is RESULT


def _bears_preemption(live: _Live) -> bool:
    run = live.run
    return not live.whole or (not run.edited and not run.recorders and (run.done or run.waiting == RESULT))


_KNOWN = (Interleaver, TappedInterleaver, Leader, TappedLeader, StageLeader)
"""What serves blocks where one run may stand for many."""
_RESUMED = 64
"""Further steps in which a request that may be preempted computes its tokens again."""
_NOTHING = Job("", FunctionBlock(lambda tracer: None))
"""The block of a request that is refused."""
