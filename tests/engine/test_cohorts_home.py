"""What blocks leave that ran once for many requests, where values go to the host while the engine goes on: each
request's share is what it would have left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from insitu import VLLM
from insitu.run.sending import Sender
from tests.engine.cohorts import PROMPTS, alone_and_together, counted, host_of, same
from tests.engine.test_cohorts_steps import BLOCKS, GREEDY

pytestmark = [pytest.mark.in_process, pytest.mark.slow, pytest.mark.usefixtures("several_threads")]


@pytest.fixture
def far(llama: VLLM) -> Iterator[Sender]:
    """Values are sent, as from a GPU."""
    room = host_of(llama).interleaver
    before, room.sender = room.sender, Sender(is_far=lambda tensor: True)
    try:
        yield room.sender
    finally:
        room.sender = before


def changes_what_it_keeps(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        rows, last = [], model.resid_post[0][-1] * 0
        for step in tracer.iter[1:]:
            x = model.resid_post[1]
            rows.append(x)
            last += x[-1]
            if step > 2:
                rows[0] *= 2
        return {"rows": rows, "last": last}

    return block


def reads_a_prompt(model: VLLM) -> Callable[[Any], Any]:
    return lambda tracer: (model.resid_post[1], [model.mlp_out[2][-1], 3], {"logits": model.logits})


@pytest.mark.parametrize("made", [*BLOCKS, changes_what_it_keeps, reads_a_prompt])
@pytest.mark.parametrize("ends", ["together", "apart"])
def test_what_is_sent_is_as_alone(
    llama: VLLM, far: Sender, made: Callable[[VLLM], Callable[[Any], Any]], ends: str
) -> None:
    drawn = llama.run(lambda tracer: [llama.samples.clone() for _ in tracer.iter[:]], PROMPTS, **GREEDY)
    stops = [int(each[step]) for each, step in zip(drawn, [1, 3, 0, 2, 3, 4], strict=True)]
    sampling: dict[str, Any] = {"ignore_eos": True} if ends == "together" else {"stop_token_ids": stops}
    with counted(llama) as counts:
        alone, together = alone_and_together(llama, lambda: llama.run(made(llama), PROMPTS, **sampling, **GREEDY))
    assert not isinstance(together, BaseException) or ends == "apart", together
    assert same(alone, together)
    assert counts == [len(PROMPTS), 2 * len(PROMPTS)]
    assert far._pinned.used <= sum(each.nbytes for each in tensors_in(together))
    for each in tensors_in(together):
        assert each.untyped_storage().nbytes() == each.numel() * each.element_size()
        assert not each.is_inference()
    del together
    assert far._pinned.used == 0
    assert not far._parcels


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [each for part in parts for each in tensors_in(part)]


def test_values_are_sent_as_soon_as_nothing_changes_them(llama: VLLM, far: Sender) -> None:
    sent: list[tuple[int, ...]] = []
    original = far.send_packed

    def noted(tensor: torch.Tensor, counts: Any) -> Any:
        sent.append(tuple(tensor.shape))
        return original(tensor, counts)

    far.send_packed = noted  # type: ignore[method-assign]

    def block(tracer: Any) -> Any:
        return [llama.resid_post[1][-1] for _ in tracer.iter[:]]

    llama.run(block, PROMPTS, ignore_eos=True, **GREEDY)
    sent.clear()
    llama.run(block, PROMPTS, ignore_eos=True, **GREEDY)
    assert sent == [(len(PROMPTS), 128)] * GREEDY["max_tokens"]
