"""The prompts of a data set as token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from insitu.block import ArgumentError
from insitu.dataset.prompts import Part, Prompt, prompts_of
from insitu.engine.client.prompts import token_ids

if TYPE_CHECKING:
    from insitu.engine.client.model import VLLM

_TOGETHER = 256


@dataclass(frozen=True)
class Tokenised:
    prompt: Prompt
    ids: list[int]


class Tokens:
    """The prompts of a data set as token ids."""

    def __init__(self, model: VLLM, data: Any, column: str | None, truncate: int | None) -> None:
        self._model = model
        self.prompts: Iterable[Prompt] = prompts_of(data, column)
        self.truncate = truncate

    def __iter__(self) -> Iterator[Tokenised]:
        return self.after(0)

    def after(self, count: int) -> Iterator[Tokenised]:
        """All but the first ``count``, which are not tokenised."""
        rest = islice(self.prompts, count, None)
        while some := list(islice(rest, _TOGETHER)):
            yield from self._tokenised(some)

    def first(self) -> Tokenised:
        """The first of the whole data set with a token in it. Raises ``ArgumentError`` if there is none."""
        whole = self.prompts.whole if isinstance(self.prompts, Part) else self.prompts
        found = (one for prompt in whole for one in self._tokenised([prompt]) if one.ids)
        first = next(found, None)
        if first is None:
            raise ArgumentError("data: there is no prompt with a token in it")
        return first

    def _tokenised(self, prompts: list[Prompt]) -> Iterator[Tokenised]:
        for prompt, ids in zip(prompts, self._ids([prompt.value for prompt in prompts]), strict=True):
            yield Tokenised(prompt, ids[: self.truncate])

    def _ids(self, values: list[Any]) -> list[list[int]]:
        tokenizer = self._model.tokenizer
        if all(isinstance(value, str) for value in values):
            return [list(ids) for ids in tokenizer(values)["input_ids"]]
        return [
            list(tokenizer(value)["input_ids"]) if isinstance(value, str) else token_ids(value, lambda: tokenizer)
            for value in values
        ]
