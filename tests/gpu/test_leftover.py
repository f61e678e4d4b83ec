"""What a block made of the KV cache that is not finite does not reach the requests that get its memory next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import insitu
from tests.engine.test_leftover import PROMPTS, spoiling

pytestmark = pytest.mark.gpu

SETTINGS = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "detokenize": False}


@pytest.fixture(scope="module", params=[False, True], ids=["compiled", "eager"])
def model(request: pytest.FixtureRequest, folder: str) -> Iterator[Any]:
    """Its KV cache has room for few requests, so that they soon get what others have left."""
    arguments = {"dtype": "bfloat16", "max_model_len": 64, "gpu_memory_utilization": 0.1, "skip_tokenizer_init": True}
    arguments |= {"num_gpu_blocks_override": 6, "enforce_eager": request.param, "dispatch": True}
    with insitu.VLLM(folder, **arguments) as model:
        yield model


@pytest.mark.parametrize("count", [1, 4], ids=["alone", "together"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_later_requests_are_as_they_were(model: Any, count: int, value: float) -> None:
    def last(tracer: Any) -> Any:
        return model.resid_post[-1]

    before = [value.float() for value in model.run(last, PROMPTS, **SETTINGS)]
    for _ in range(3):
        assert all(logits.isnan().all() for logits in model.run(spoiling(model, value), PROMPTS[:count], **SETTINGS))
        after = [value.float() for value in model.run(last, PROMPTS, **SETTINGS)]
        assert all((one - two).norm() < 0.02 * two.norm() for one, two in zip(after, before, strict=True))
