"""What a sweep measures: functions of the logits ``[vocab]`` of a prompt's last token."""

from __future__ import annotations

from collections.abc import Callable

import torch

from insitu.block import ArgumentError
from insitu.engine.client.model import VLLM

Metric = Callable[[torch.Tensor], torch.Tensor]


def logit_difference(model: VLLM, right: str, wrong: str) -> Metric:
    """The logit of the token ``right`` less that of ``wrong``, the usual metric of patching (Wang et al., 2022).

    Raises ``ArgumentError`` if one of them is not one token; mind the space before a word.
    """
    first, second = (_one_token(model, text) for text in (right, wrong))

    def difference(logits: torch.Tensor) -> torch.Tensor:
        return logits[first] - logits[second]

    return difference


def _one_token(model: VLLM, text: str) -> int:
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        pieces = [model.tokenizer.decode([token]) for token in ids]
        raise ArgumentError(f"{text!r} is {len(ids)} tokens ({pieces}); the metric compares one with one")
    return ids[0]
