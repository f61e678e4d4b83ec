"""The log-probabilities that vLLM returns, once a block has chosen another id than the one drawn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def rescored(scores: Any, drawn: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor, mode: str) -> Iterator[int]:
    """Puts the ids that generation goes on from, ``ids``, in the place of those that were ``drawn``.

    ``scores`` are vLLM's ``LogprobsTensors``, whose first column is that of the id drawn, ``logits`` what they
    were made of. Gives the rows that ``mode`` has made of something else, so that they can't be put right.
    """
    if scores is None or not scores.logprob_token_ids.numel():
        return
    for row in (drawn != ids).flatten().nonzero().flatten().tolist():
        if mode not in ("raw_logprobs", "raw_logits"):
            yield row
            continue
        values = logits[row].float()
        if mode == "raw_logprobs":
            values = values.log_softmax(-1)
        chosen = ids.flatten()[row].long()
        scores.logprob_token_ids[row, 0] = chosen
        scores.logprobs[row, 0] = values[chosen]
        scores.selected_token_ranks[row] = (values >= values[chosen]).sum()
