"""The scores by which a layer chooses its experts are read, and edits of them decide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import models
from tests.architectures.configs import ARCHITECTURES, EXPERTS
from tests.architectures.conftest import engine, params
from tests.architectures.reference import streams
from tests.architectures.tiny import tiny
from tests.engine.helpers import PROMPT, assert_close

NAMES = [name for name, architecture in ARCHITECTURES.items() if architecture.has_experts]


@pytest.fixture(scope="module", params=params(NAMES))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name: str, engines: Any) -> Iterator[Any]:
    with engine(engines, name, "float32") as made:
        yield made


@pytest.mark.parametrize("expert", range(EXPERTS))
def test_an_expert_with_minus_infinity_is_never_chosen(name: str, model: Any, expert: int) -> None:
    def without(logits: torch.Tensor) -> torch.Tensor:
        logits[:, expert] = float("-inf")
        return logits

    with model.trace(temperature=0.0, max_tokens=1) as tracer:
        with tracer.invoke(PROMPT):
            logits = model.router_logits[1].save()
            plain = model.resid_post[1].save()
        with tracer.invoke(PROMPT):
            without(model.router_logits[1])
            edited = model.resid_post[1].save()
    ids = models.encode(tiny(name), PROMPT)
    assert logits.shape == (len(ids), EXPERTS)
    assert_close(logits, streams(name, ids)["router_logits", 1], "router_logits")
    assert_close(edited, streams(name, ids, ("router_logits", 1, without))["resid_post", 1], "resid_post")
    chosen = (logits.topk(2).indices == expert).any(-1)
    changed = ~torch.isclose(edited, plain, atol=1e-4).all(-1)
    assert changed[chosen].all()
