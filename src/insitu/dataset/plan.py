"""What a capture reads, in the order of the forward, and how many prompts run together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch

from insitu._version import __version__
from insitu.block import ArgumentError, InsituError, PromptError
from insitu.dataset.applied import function_of
from insitu.dataset.errors import CaptureError
from insitu.dataset.progress import Progress
from insitu.dataset.reading import LOGITS, Phase, Positions, Read, Reading
from insitu.dataset.store import Entry, Store
from insitu.dataset.tokens import Tokenised, Tokens
from insitu.engine.client.view import view_of
from insitu.tree import Named

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


class Plan:
    def __init__(
        self,
        model: VLLM,
        tokens: Tokens,
        at: str | Sequence[str],
        positions: Any,
        phase: Phase,
        dtype: torch.dtype | str | None,
        apply: Any,
        sampling: Mapping[str, Any],
        window_tokens: int | None,
    ) -> None:
        self._model, self._tokens, self._sampling = model, tokens, dict(sampling)
        self._positions, self._phase = Positions.of(positions), phase
        self._given = {"positions": str(positions), "phase": phase, "dtype": str(dtype), "apply": _label(apply)}
        self._dtype, self._apply = _dtype_of(dtype), function_of(apply)
        self._by_row = self._apply is None or bool(getattr(self._apply, "by_row", False))
        self._engine = view_of(model)
        places = self._engine.named([at] if isinstance(at, str) else list(at), "at", [LOGITS])
        self._refuse_unsliceable(places)
        first = tokens.first()
        # The order of the places is that of a forward of any length.
        self.places: list[Named] = self._engine.in_order(places, first.ids[:1]) if len(places) > 1 else places
        self._reading = Reading(model, self.places, self._positions, phase, self._dtype, self._apply)
        probe = self._run([first])[0]
        self._row_bytes = sum(value[0].nbytes if len(value) else 0 for value in probe.values)
        self._probe_rows = sum(len(value) * value[0].nbytes for value in probe.values if len(value))
        low, high = _WINDOW_TOKENS
        self.window: int = window_tokens or max(low, min(high, _WINDOW_BYTES // max(self._row_bytes, 1)))

    def arguments(self, shard_bytes: int) -> dict[str, Any]:
        """What has to be the same for a capture to be gone on with."""
        return {
            "model": self._engine.name,
            "model_dtype": self._engine.dtype,
            **self._given,
            "truncate": self._tokens.truncate,
            "sampling": {name: str(value) for name, value in sorted(self._sampling.items())},
            "shard_bytes": shard_bytes,
            "window": self.window,
            "versions": {"insitu": __version__, "torch": torch.__version__, **_versions("vllm", "transformers")},
        }

    def estimate(self, shard_bytes: int) -> Estimate:
        prompts = tokens = size = 0
        shards, held = 0, 0
        for one in self._tokens:
            prompts += 1
            tokens += len(one.ids)
            more = self._bytes(one)
            size += more
            if held and held + more > shard_bytes:
                shards, held = shards + 1, 0
            held += more
        return Estimate(prompts, tokens, size, shards + bool(prompts))

    def run(self, store: Store, progress: bool) -> None:
        rest = self._rest(store)
        if store.complete:
            if next(rest, None) is not None:
                raise CaptureError(f"the capture is complete with {store.committed} prompts, and this data has more")
            return
        with Progress(self._tokens.prompts, store.start, progress) as bar, ThreadPoolExecutor(1) as writer:
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

    def _windows(self, rest: Iterator[Tokenised]) -> Iterator[list[Tokenised]]:
        """Prompts that run together: as many as fill a window."""
        window: list[Tokenised] = []
        tokens = 0
        for one in rest:
            if window and (tokens + len(one.ids) > self.window or len(window) == _WINDOW_PROMPTS):
                yield window
                window, tokens = [], 0
            window.append(one)
            tokens += len(one.ids)
        if window:
            yield window

    def _rest(self, store: Store) -> Iterator[Tokenised]:
        """What is not committed yet, from the start of its window on, so that it runs in the company that it would
        have had. The last that is committed is to be the one that the data has there."""
        if not store.committed:
            return iter(self._tokens)
        first = min(store.start, store.committed - 1)
        rest = self._tokens.after(first)
        written = list(islice(rest, store.committed - first))
        if first + len(written) < store.committed or (written[-1].prompt.id, written[-1].ids) != store.last():
            raise CaptureError(
                f"prompt {store.committed - 1} of this data is not the one that the capture has there: it was made of "
                f"other data, or with another tokenizer. Give another `out`"
            )
        return chain(written[store.start - first :], rest)

    # -- running --------------------------------------------------------------------------

    def _entries(self, window: Sequence[Tokenised]) -> list[Entry]:
        with_tokens = [one for one in window if one.ids]
        for one in with_tokens:
            if len(one.ids) >= self._engine.context:
                raise PromptError(
                    f"prompt {one.prompt.id!r} has {len(one.ids)} tokens, and the model's context of "
                    f"{self._engine.context} must also hold a generated one: truncate={self._engine.context - 1} cuts "
                    f"such prompts, or load the model with a larger max_model_len"
                )
        found = iter(self._run(with_tokens) if with_tokens else [])
        return [self._entry(one, next(found)) if one.ids else Entry(one.prompt.id, [], 0, [], []) for one in window]

    def _run(self, window: Sequence[Tokenised]) -> list[Read]:
        try:
            return self._model.run(self._reading, [one.ids for one in window], progress=False, **self._sampling)
        except InsituError as error:
            if (number := getattr(error, "invoke", None if len(window) > 1 else 0)) is not None:
                error.args = (f"prompt {window[number].prompt.id!r}: {error}",)
            raise

    def _entry(self, one: Tokenised, read: Read) -> Entry:
        tokens = [*one.ids, *read.drawn]
        if not read.values:
            return Entry(one.prompt.id, tokens, len(one.ids), [], [])
        positions = [
            self._where(place, one, len(tokens), value) for place, value in zip(self.places, read.values, strict=True)
        ]
        return Entry(one.prompt.id, tokens, len(one.ids), [value.cpu() for value in read.values], positions)

    def _where(self, place: Named, one: Tokenised, total: int, value: torch.Tensor) -> list[int] | None:
        """Positions of a place's rows in the sequence: those chosen of the prompt, each drawn token but the last."""
        count = len(one.ids)
        prompt: Iterable[int] = ()
        if self._phase != "generated":
            prompt = range(count - 1, count) if place.stream == LOGITS else self._among(one)
        found = [*prompt, *(range(count, total - 1) if self._phase != "prompt" else ())]
        return found if self._by_row and len(found) == len(value) else None

    def _among(self, one: Tokenised) -> range:
        text = self._positions.text
        return self._positions.among(len(one.ids), self._model.positions_of(text, one.ids) if text else None)

    def _bytes(self, one: Tokenised) -> int:
        if not one.ids:
            return 0
        if not self._by_row or self._phase != "prompt":
            return self._probe_rows
        return self._row_bytes * len(self._among(one))

    # -- places ---------------------------------------------------------------------------

    def _refuse_unsliceable(self, places: Sequence[Named]) -> None:
        patterns = [one for one in places if one.stream == "attn_pattern"]
        if patterns and self._apply is None:
            raise ArgumentError(
                f"at: `{patterns[0]}` is [heads, queries, keys], without a row for each token: give `apply=`, a "
                f"function that makes rows of it"
            )


def _label(apply: Any) -> str | None:
    if apply is None or isinstance(apply, str):
        return apply
    return f"{getattr(apply, '__module__', '')}.{getattr(apply, '__qualname__', type(apply).__qualname__)}"


def _dtype_of(given: torch.dtype | str | None) -> torch.dtype | None:
    if given is None or isinstance(given, torch.dtype):
        return given
    found = getattr(torch, given.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ArgumentError(f"dtype={given!r}: it is a dtype of torch, as 'bfloat16' or 'float32'")
    return found


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
