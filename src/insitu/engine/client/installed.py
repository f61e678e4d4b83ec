"""The edits that stay on an engine: which there are, and which requests run under which.

It stands where requests leave vLLM's front end for its engine core, so that those of every entry point pass. What it
says to the workers goes through whoever owns it, which may wait for answers or await them.
"""

from __future__ import annotations

import copy
import uuid
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from vllm import RequestOutput

from insitu.block import ArgumentError, user_traceback
from insitu.engine.job import BY_BLOCK
from insitu.engine.names import nearest
from insitu.engine.tag import ASKED, Tag, tag_of
from insitu.run import Outcome

if TYPE_CHECKING:
    from insitu.engine.client.edit import Edit


class _Grouped(str):
    """The id that an output will carry, which knows the group of its request."""

    group: str


class Installed:
    """The edits of one engine. ``front``: vLLM's ``LLMEngine`` or ``AsyncLLM``."""

    def __init__(self, front: Any) -> None:
        self._processor = front.output_processor
        self._edits: dict[int, Edit] = {}
        self._numbers = count(1)
        self._groups: dict[str, tuple[int, ...]] = {}
        self._queues: dict[str, Any] = {}
        self._collecting: set[str] = set()
        self._uses: Counter[int] = Counter()
        self._salt = uuid.uuid4().hex

    def __iter__(self) -> Any:
        return iter(list(self._edits.values()))

    def __len__(self) -> int:
        return len(self._edits)

    # -- edits ----------------------------------------------------------------------------

    def number(self, name: str | None, tenant: str = "") -> int:
        """That of a new edit. Raises ``ArgumentError`` if there is one of that name, for the same requests."""
        if name is not None and name in _names(self._of(tenant)):
            raise ArgumentError(
                f"there is an edit `{name}` already: clear that one first, or give this one another name"
            )
        return next(self._numbers)

    def add(self, edit: Edit) -> None:
        """To be called when the workers have it: requests that come from now on run under it."""
        self._edits[edit.number] = edit

    def remove(self, numbers: Iterable[int]) -> list[int]:
        """Requests that come from now on don't run under these. Returns those that the workers may forget."""
        gone = [number for number in numbers if self._edits.pop(number, None)]
        return [number for number in gone if not self._uses[number]]

    def chosen(self, names: Sequence[str] | None, tenant: str = "") -> list[Edit]:
        """Those of a request of ``tenant``'s that asks for ``names``, and all unnamed ones; None: all.

        Raises ``ArgumentError`` for a name that no edit for such requests has.
        """
        edits = self._of(tenant)
        if names is None:
            return edits
        known = _names(edits)
        for name in names:
            if name not in known:
                raise ArgumentError(f"edits: there is no installed edit `{name}`{nearest(name, known)}")
        return [edit for edit in edits if edit.name is None or edit.name in names]

    def _of(self, tenant: str) -> list[Edit]:
        """Those for everybody's requests, and those for this tenant's."""
        return [edit for edit in self._edits.values() if edit.tenant in ("", tenant)]

    # -- requests -------------------------------------------------------------------------

    def stamp(self, request: Any) -> None:
        """Says on a request (vLLM's ``EngineCoreRequest``, its state already in the output processor) which edits
        run beside it."""
        params = request.sampling_params
        asked = (getattr(params, "extra_args", None) or {}).get(ASKED)
        if params is None or (not self._edits and asked is None):
            return
        tag, edits = tag_of(params) or Tag(whole=False), list[Any]()
        try:
            edits = self.chosen(_as_names(asked), tag.tenant)
            _require_single(request, edits)
        except ArgumentError as error:
            tag = replace(tag, refusal=str(error))
        if not edits and not tag.refusal:
            return
        numbers = tuple(edit.number for edit in edits)
        whole = tag.whole or not all(edit.same_for_rows for edit in edits)
        group = self._group(request, numbers)
        tag = replace(tag, group=group, edits=numbers, whole=whole)
        params = request.sampling_params = copy.copy(params)  # the sequences of a request share theirs
        tag.put_on(params)
        # What was computed under these edits is for requests with the same ones alone; and where a block may
        # depend on which rows it is shown, all are computed.
        if tag.job is None:
            request.cache_salt = "-".join(filter(None, (request.cache_salt, self._salt, *map(str, numbers))))
        if whole:
            params.skip_reading_prefix_cache = True

    def _group(self, request: Any, numbers: tuple[int, ...]) -> str:
        """That of the request, which is new with the first of its sequences."""
        state = self._processor.request_states[request.request_id]
        holder = state if state.parent_req is None else state.parent_req
        given = holder.external_req_id
        if isinstance(given, _Grouped):
            return given.group
        marked = holder.external_req_id = _Grouped(given)
        group = marked.group = holder.request_id
        self._groups[group] = numbers
        self._uses.update(numbers)
        if state.queue is not None:
            self._watch(group, state.queue)
        return group

    def _watch(self, group: str, queue: Any) -> None:
        """Notes the queue of an ``AsyncLLM``'s request until whoever takes from it has left."""
        close, queues = queue.close, self._queues

        def closed() -> None:
            queues.pop(group, None)
            vars(queue).pop("close", None)
            close()

        queues[group], queue.close = weakref.ref(queue), closed

    def finished(self, outputs: Iterable[Any]) -> dict[str, Any]:
        """Those of the outputs whose requests have ended under edits, by group; what these left is to be collected."""
        found: dict[str, Any] = {}
        for output in outputs:
            if isinstance(output, RequestOutput) and output.finished:
                prepare(output)
                group = getattr(output.request_id, "group", None)
                if group in self._groups:
                    found[group] = output
        self._collecting.update(found)
        return found

    def gone(self) -> list[str]:
        """Groups whose requests were aborted: nobody will ask for what their edits leave."""
        states, parents = self._processor.request_states, self._processor.parent_requests
        over = (group for group in self._groups if group not in states and group not in parents)
        return [group for group in over if group not in self._collecting and not self._is_waited_for(group)]

    def _is_waited_for(self, group: str) -> bool:
        """Whether an output lies in a queue of ``AsyncLLM`` and somebody is still to take it from there."""
        queue = self._queues[group]() if group in self._queues else None
        return queue is not None and queue.output is not None

    def forget(self, groups: Iterable[str]) -> list[int]:
        """These have been collected or dropped. Returns the numbers of cleared edits that the workers may forget."""
        ended: Counter[int] = Counter()
        for group in groups:
            ended.update(self._groups.pop(group, ()))
            self._queues.pop(group, None)
            self._collecting.discard(group)
        self._uses.subtract(ended)
        return [number for number in ended if number not in self._edits and not self._uses[number]]

    @property
    def outstanding(self) -> int:
        """How many requests run under edits, or have ended unheard of."""
        return len(self._groups)

    def attach(self, output: Any, outcomes: Sequence[Outcome]) -> None:
        """Puts on an output what the edits beside its request left."""
        # The last of several outputs of a streamed request may hold but one of its sequences.
        count = max((each.sequence + 1 for each in outcomes), default=0)
        saves: list[dict[str, Any]] = [{} for _ in range(max(count, len(output.outputs)))]
        for outcome in outcomes:
            edit = self._edits.get(outcome.edit or 0)
            if edit is not None:
                edit.warn_of(outcome.lost)
                edit.warn_of_hidden(saves[outcome.sequence].keys() & outcome.saves.keys())
            # An edit that is a form returns what it has read.
            saves[outcome.sequence].update(outcome.saves or outcome.returned or {})
            if outcome.error is not None and output.error is None:
                output.error = outcome.error
                outcome.error.__traceback__ = user_traceback(outcome.error)
        for completion in output.outputs:
            mine = saves[completion.index] if len(saves) > 1 else saves[0]
            vars(completion)["saves"] = {n: v for n, v in mine.items() if not isinstance(v, RequestOutput)}
        names = dict.fromkeys(name for mine in saves for name in mine)
        gathered = {name: [mine.get(name) for mine in saves] for name in names}
        output.saves = {name: each[0] if len(each) == 1 else each for name, each in gathered.items()}


def prepare(output: Any) -> None:
    """Gives a finished output what every one has, edits or not."""
    output.saves, output.error = {}, None
    for completion in output.outputs:
        vars(completion)["saves"] = {}
        if completion.stop_reason == BY_BLOCK:
            completion.finish_reason = "stop"


def _names(edits: Iterable[Edit]) -> list[str]:
    return [edit.name for edit in edits if edit.name is not None]


def _as_names(asked: Any) -> list[str] | None:
    if asked is None or (isinstance(asked, (list, tuple)) and all(isinstance(name, str) for name in asked)):
        return None if asked is None else list(asked)
    raise ArgumentError(f"{ASKED} takes a list of names of edits; got {asked!r:.60}")


def _require_single(request: Any, edits: Sequence[Any]) -> None:
    if edits and getattr(request, "resumable", False):
        raise ArgumentError("a request whose prompt is streamed in can't run under an edit")
