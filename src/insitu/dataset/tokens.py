"""The prompts of a data set as token ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from insitu.dataset.prompts import Prompt, prompts_of
from insitu.engine.client.prompts import token_ids

if TYPE_CHECKING:
    from insitu.engine.client.model import VLLM


@dataclass(frozen=True)
class Tokenised:
    prompt: Prompt
    ids: list[int]


class Tokens:
    """The prompts of a data set as token ids."""

    def __init__(self, model: VLLM, data: Any, column: str | None, truncate: int | None) -> None:
        self._model = model
        self.prompts = prompts_of(data, column)
        self.truncate = truncate

    def __iter__(self) -> Iterator[Tokenised]:
        rest = iter(self.prompts)
        while some := list(islice(rest, 256)):
            for prompt, ids in zip(some, self._ids([prompt.value for prompt in some]), strict=True):
                yield Tokenised(prompt, ids[: self.truncate])

    def _ids(self, values: list[Any]) -> list[list[int]]:
        tokenizer = self._model.tokenizer
        if all(isinstance(value, str) for value in values):
            return [list(ids) for ids in tokenizer(values)["input_ids"]]
        return [
            list(tokenizer(value)["input_ids"]) if isinstance(value, str) else token_ids(value, lambda: tokenizer)
            for value in values
        ]
