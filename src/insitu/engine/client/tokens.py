"""Token ids as text: the string of each, and where a piece of text lies among them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from insitu.block import ArgumentError, PromptError

Span = tuple[int, int]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_SENTENCEPIECE_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def token_strings(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token. Bytes that are no whole character show as a replacement character."""
    known: dict[int, str] = {}
    for token in ids:
        if token not in known:
            known[token] = _string(tokenizer, token)
    return [known[token] for token in ids]


def positions_of(
    tokenizer: Any, ids: Sequence[int], text: str, occurrence: int = 0, every: bool = False, source: str | None = None
) -> range | list[range]:
    """Positions of the tokens that overlap ``text``: of one occurrence of it, or of ``every`` one.

    ``source``: the text that the ids were made of, where there is one. Raises ``PromptError`` if it does
    not occur (so often).
    """
    if not isinstance(text, str) or not text:
        raise ArgumentError(f"positions are looked up by a text of at least one character; got {text!r}")
    for whole, spans in _readings(tokenizer, ids, source):
        found = [_overlapping(spans, match.span()) for match in re.finditer(re.escape(text), whole)]
        found = [positions for positions in found if positions]
        if every and found:
            return found
        if -len(found) <= occurrence < len(found):
            return found[occurrence]
        if found:
            break
    else:
        found = []
    times = f"{len(found)} time{'' if len(found) == 1 else 's'}"
    missing = f"occurs {times}, so there is no occurrence {occurrence}" if found else "does not occur"
    raise PromptError(f"`{text}` {missing} in the prompt; its tokens are {_listed(token_strings(tokenizer, ids))}")


def _string(tokenizer: Any, token: int) -> str:
    text = _decoded(tokenizer, [token])
    piece = tokenizer.convert_ids_to_tokens(token)
    # Decoding drops the space before a first word.
    if isinstance(piece, str) and piece.startswith(_SENTENCEPIECE_SPACE) and not text.startswith(" "):
        return f" {text}"
    return text


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _readings(tokenizer: Any, ids: Sequence[int], source: str | None) -> Iterator[tuple[str, list[Span]]]:
    """The text of ``ids`` with the span of each token in it, by each way that is open, the surest first."""
    fast = getattr(tokenizer, "is_fast", False)
    whole = _decoded(tokenizer, ids)
    if fast and (source is None or source in whole):
        encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        if list(encoded["input_ids"]) == list(ids):
            yield whole, encoded["offset_mapping"]
    if fast and source is not None and source not in whole:  # it was normalised: the ids don't say it all
        encoded = tokenizer(source, return_offsets_mapping=True)
        if list(encoded["input_ids"]) == list(ids):
            yield source, encoded["offset_mapping"]
    yield spans_by_decoding(ids, lambda part: _decoded(tokenizer, part))


def spans_by_decoding(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> tuple[str, list[Span]]:
    """The text of ``ids``, and the span of each in it, found by decoding a few at a time.

    Tokens that share a character, each holding some of its bytes, all have it in their spans.
    """
    text, spans = "", []
    before, start = 0, 0  # tokens before:start are decoded along, for the space between them and what follows
    for stop in range(1, len(ids) + 1):
        context = len(decode(ids[before:start]))
        piece = decode(ids[before:stop])[context:]
        if piece.endswith(_UNFINISHED) and stop < len(ids):
            continue
        done = 0
        for end in range(start + 1, stop + 1):
            part = decode(ids[before:end])[context:]
            whole = len(piece) if end == stop else len(part.rstrip(_UNFINISHED))
            reaches = whole if whole == len(part) else whole + 1
            spans.append((len(text) + done, len(text) + max(reaches, done)))
            done = max(done, whole)
        text += piece
        before, start = start, stop
    return text, spans


def _overlapping(spans: Sequence[Span], wanted: Span) -> range:
    hit = [i for i, (start, stop) in enumerate(spans) if start < wanted[1] and stop > wanted[0]]
    return range(hit[0], hit[-1] + 1) if hit else range(0)


def _listed(tokens: list[str]) -> str:
    shown = [f"{i} {token!r}" for i, token in enumerate(tokens)]
    return ", ".join(shown if len(shown) <= 40 else [*shown[:30], "...", *shown[-8:]])
