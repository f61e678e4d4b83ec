"""Captures what a model computes on a data set, and goes on where an earlier run of the same capture has ended."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from operator import length_hint
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from insitu._version import __version__
from insitu.block import ArgumentError, InsituError
from insitu.capture.applied import function_of
from insitu.capture.captured import Captured
from insitu.capture.errors import CaptureError
from insitu.capture.prompts import Prompt, prompts_of
from insitu.capture.reading import LOGITS, PHASES, Phase, Positions, Read, Reading
from insitu.capture.store import Entry, Store
from insitu.tree import Named, named

if TYPE_CHECKING:
    from insitu.engine.client.model import VLLM

_WINDOW_BYTES = 256 * 2**20
_WINDOW_TOKENS = (1024, 65536)
_WINDOW_PROMPTS = 2048


@dataclass(frozen=True)
class Estimate:
    """What a capture would write. ``bytes`` is of the tensors; exact unless ``apply`` makes other numbers of rows
    for other prompts, or tokens are generated."""

    prompts: int
    tokens: int
    bytes: int
    shards: int

    def __str__(self) -> str:
        return (
            f"{self.prompts} prompts, {self.tokens} tokens: {self.bytes} bytes ({self.bytes / 2**30:.2f} GiB) "
            f"in {self.shards} shards"
        )


def capture(
    model: VLLM | str,
    data: Any,
    *,
    at: str | Sequence[str],
    out: str | os.PathLike[str],
    positions: Any = "all",
    phase: Phase = "prompt",
    dtype: torch.dtype | str | None = None,
    apply: Any = None,
    column: str | None = None,
    truncate: int | None = None,
    shard_bytes: int = 2**30,
    dry_run: bool = False,
    progress: bool = True,
    **sampling: Any,
) -> Captured | Estimate:
    """Writes what ``model`` computes at the places ``at``, for each prompt of ``data``, to the folder ``out``.

    ``model``: a ``VLLM``, or what names one. ``data``: a text, JSON-lines, Parquet or CSV file, a folder of them, a list
    of prompts or rows, or a data set of the library ``datasets``; ``column`` names the column with the prompts
    (text, token ids or chats). ``at``: standard names and modules, as ``resid_post[4:8]``, ``model.layers.*.mlp.output``,
    ``model.layers.3.output[0]``, ``logits``.

    ``positions``: which of the prompt's tokens: ``"all"``, ``"last"``, a number, a slice, or ``"text:Paris"``, the tokens
    of a piece of the prompt. ``phase``: the rows of the ``"prompt"``, of the tokens ``"generated"`` (each but the
    last goes through the model), or ``"all"``; ``sampling`` are then the sampling parameters. ``dtype``: of what is
    written, the model's if left out. ``apply``: a function of the rows ``[rows, width]`` of a prompt at a place, run in
    the engine; ``"mean"``, ``"project:FILE.safetensors"``, ``"FILE.py:NAME"``. ``truncate``: prompts are cut to so many tokens.

    Shards have at most ``shard_bytes``, unless one window of prompts that run together has more; a shard is held in memory
    until it is written. Run again after it was stopped, killed or ran out of disk, the same capture goes on with its next
    shard, and what comes out is what one run would have written. A prompt without tokens is in the index, with no rows.

    ``dry_run`` returns an ``Estimate`` and writes nothing. Raises ``CaptureError``, and ``ArgumentError`` for arguments.
    """
    from insitu.engine.client.model import VLLM

    if phase not in PHASES:
        raise ArgumentError(f"phase={phase!r}: it is one of {', '.join(map(repr, PHASES))}")
    if phase == "prompt":
        sampling = {"temperature": 0.0, "max_tokens": 1, **sampling}
    owned = None if isinstance(model, VLLM) else VLLM(model)
    model = owned or model
    try:
        plan = _Plan(model, _Tokens(model, data, column, truncate), at, positions, phase, dtype, apply, sampling)
        if dry_run:
            return plan.estimate(shard_bytes)
        store = Store(Path(out), [str(one) for one in plan.places], plan.arguments(shard_bytes), shard_bytes)
        try:
            plan.run(store, progress)
        finally:
            store.close()
        return Captured(out)
    finally:
        if owned is not None:
            owned.close()


@dataclass(frozen=True)
class _Tokenised:
    prompt: Prompt
    ids: list[int]


class _Tokens:
    """The prompts of a data set as token ids."""

    def __init__(self, model: VLLM, data: Any, column: str | None, truncate: int | None) -> None:
        self._model = model
        self.prompts = prompts_of(data, column)
        self._truncate = truncate

    def __iter__(self) -> Iterator[_Tokenised]:
        rest = iter(self.prompts)
        while some := list(islice(rest, 256)):
            for prompt, ids in zip(some, self._ids([prompt.value for prompt in some]), strict=True):
                yield _Tokenised(prompt, ids[: self._truncate])

    def _ids(self, values: list[Any]) -> list[list[int]]:
        from insitu.engine.client.prompts import token_ids

        tokenizer = self._model.tokenizer
        if all(isinstance(value, str) for value in values):
            return [list(ids) for ids in tokenizer(values)["input_ids"]]
        return [
            list(tokenizer(value)["input_ids"]) if isinstance(value, str) else token_ids(value, lambda: tokenizer)
            for value in values
        ]


class _Plan:
    """What is read, in the order of the forward, and how many prompts run together."""

    def __init__(
        self,
        model: VLLM,
        tokens: _Tokens,
        at: str | Sequence[str],
        positions: Any,
        phase: Phase,
        dtype: torch.dtype | str | None,
        apply: Any,
        sampling: Mapping[str, Any],
    ) -> None:
        self._model, self._tokens, self._sampling = model, tokens, dict(sampling)
        self._positions, self._phase = Positions.of(positions), phase
        self._given = {"positions": str(positions), "phase": phase, "dtype": str(dtype), "apply": _label(apply)}
        self._dtype, self._apply = _dtype_of(dtype), function_of(apply)
        places = model.named([at] if isinstance(at, str) else list(at), "at", streams=[LOGITS])
        self._refuse_unsliceable(places)
        self.places = self._in_order(places)
        self._reading = Reading(model, self.places, self._positions, phase, self._dtype, self._apply)
        probe = self._run([self._first()])[0]
        self._row_bytes = sum(value[0].nbytes if len(value) else 0 for value in probe.values)
        self._probe_rows = sum(len(value) * value[0].nbytes for value in probe.values if len(value))
        low, high = _WINDOW_TOKENS
        self.window = max(low, min(high, _WINDOW_BYTES // max(self._row_bytes, 1)))

    def arguments(self, shard_bytes: int) -> dict[str, Any]:
        """What has to be the same for a capture to be gone on with."""
        return {
            "model": self._model.name,
            "model_dtype": self._model.dtype,
            **self._given,
            "truncate": self._tokens._truncate,
            "sampling": {name: str(value) for name, value in sorted(self._sampling.items())},
            "shard_bytes": shard_bytes,
            "window": self.window,
            "versions": {"insitu": __version__, "torch": torch.__version__, **_versions("vllm", "transformers")},
        }

    def estimate(self, shard_bytes: int) -> Estimate:
        prompts = tokens = size = 0
        shards, held = 0, 0
        for window in self._windows(iter(self._tokens)):
            prompts += len(window)
            tokens += sum(len(one.ids) for one in window)
            more = sum(self._bytes(one) for one in window)
            size += more
            if held and held + more > shard_bytes:
                shards, held = shards + 1, 0
            held += more
        return Estimate(prompts, tokens, size, shards + bool(prompts))

    def run(self, store: Store, progress: bool) -> None:
        if store.complete:
            return
        rest = iter(self._tokens)
        self._skip(rest, store)
        with _Progress(self._tokens.prompts, store.committed, progress) as bar, ThreadPoolExecutor(1) as writer:
            writing: Future[None] | None = None
            for window in self._windows(rest):
                entries = self._entries(window)
                # One window is written while the next one runs, and no more: memory stays bounded.
                if writing is not None:
                    writing.result()
                writing = writer.submit(store.add, entries)
                bar.advance(entries)
            if writing is not None:
                writing.result()
            store.finish()

    # -- prompts --------------------------------------------------------------------------

    def _first(self) -> _Tokenised:
        first = next((one for one in self._tokens if one.ids), None)
        if first is None:
            raise ArgumentError("data: there is no prompt with a token in it")
        return first

    def _windows(self, rest: Iterator[_Tokenised]) -> Iterator[list[_Tokenised]]:
        """Prompts that run together: as many as fill a window, so that a shard always begins with a new one."""
        window: list[_Tokenised] = []
        tokens = 0
        for one in rest:
            if window and (tokens + len(one.ids) > self.window or len(window) == _WINDOW_PROMPTS):
                yield window
                window, tokens = [], 0
            window.append(one)
            tokens += len(one.ids)
        if window:
            yield window

    def _skip(self, rest: Iterator[_Tokenised], store: Store) -> None:
        """Passes over what is committed, which is to be the same data."""
        last = None
        for last in islice(rest, store.committed):
            pass
        if store.committed and (last is None or (last.prompt.id, last.ids) != store.last()):
            raise CaptureError(
                f"prompt {store.committed - 1} of this data is not the one that the capture has there: it was made of "
                f"other data, or with another tokenizer. Give another `out`"
            )

    # -- running --------------------------------------------------------------------------

    def _entries(self, window: Sequence[_Tokenised]) -> list[Entry]:
        with_tokens = [one for one in window if one.ids]
        found = iter(self._run(with_tokens) if with_tokens else [])
        return [
            self._entry(one, next(found)) if one.ids else Entry(one.prompt.id, [], 0, [], []) for one in window
        ]

    def _run(self, window: Sequence[_Tokenised]) -> list[Read]:
        try:
            return self._model.run(self._reading, [one.ids for one in window], **self._sampling)
        except InsituError as error:
            if (number := getattr(error, "invoke", None)) is not None:
                error.args = (f"prompt {window[number].prompt.id!r}: {error}",)
            raise

    def _entry(self, one: _Tokenised, read: Read) -> Entry:
        tokens = [*one.ids, *read.drawn]
        positions = [
            self._where(place, one, len(tokens), value) for place, value in zip(self.places, read.values, strict=True)
        ]
        return Entry(one.prompt.id, tokens, len(one.ids), [value.cpu() for value in read.values], positions)

    def _where(self, place: Named, one: _Tokenised, total: int, value: torch.Tensor) -> list[int] | None:
        """The positions of a place's rows in the sequence: chosen ones of the prompt, and each drawn token but the last."""
        count = len(one.ids)
        prompt: Iterable[int] = ()
        if self._phase != "generated":
            prompt = range(count - 1, count) if place.stream == LOGITS else self._among(one)
        found = [*prompt, *(range(count, total - 1) if self._phase != "prompt" else ())]
        return found if self._apply is None and len(found) == len(value) else None

    def _among(self, one: _Tokenised) -> range:
        text = self._positions.text
        return self._positions.among(len(one.ids), self._model.positions_of(text, one.ids) if text else None)

    def _bytes(self, one: _Tokenised) -> int:
        if not one.ids:
            return 0
        if self._apply is not None or self._phase != "prompt":
            return self._probe_rows
        return self._row_bytes * len(self._among(one))

    # -- places ---------------------------------------------------------------------------

    def _refuse_unsliceable(self, places: Sequence[Named]) -> None:
        patterns = [one for one in places if one.stream == "attn_pattern"]
        if patterns and self._apply is None:
            raise ArgumentError(
                f"at: `{patterns[0]}` is [heads, queries, keys], without a row for each token: give `apply=`, a function "
                f"that makes rows of it"
            )

    def _in_order(self, places: list[Named]) -> list[Named]:
        """As the forward comes to them, which the engine knows once it has run."""
        self._model.run(_nothing, [self._first().ids], max_tokens=1)
        order = self._model.visits(places)
        return [place for _, place in sorted(zip(order, places, strict=True), key=lambda pair: pair[0])]
