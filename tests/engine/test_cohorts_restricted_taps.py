"""Restricted blocks and forms that run once for many requests at taps, where tables in the graph do their edits."""

from __future__ import annotations

from typing import Any

import pytest

from insitu import VLLM
from tests.engine.cohorts import PROMPTS, alone_and_together, counted
from tests.engine.remote import trace
from tests.engine.taps import assert_same, recorded
from tests.engine.test_cohorts_restricted import FORMS, STEPS, WIDTH, drawn, form_of, left

pytestmark = [pytest.mark.slow, pytest.mark.in_process]


def test_a_block_that_steers_each(tapped: VLLM) -> None:
    vectors = drawn(len(PROMPTS), WIDTH)

    def work() -> Any:
        with trace(tapped, **STEPS) as tracer:
            for prompt, vector in zip(PROMPTS, vectors, strict=True):
                with tracer.invoke(prompt):
                    seen = [].save()
                    for _ in tracer.iter[:]:
                        tapped.resid_post[1][:] += vector
                        seen.append(tapped.resid_post[2][-1] * 2)
        return seen  # pyright: ignore[reportPossiblyUnboundVariable]

    with recorded(tapped), counted(tapped) as counts:
        alone, together = alone_and_together(tapped, work)
    assert_same(together, alone, "steered")
    assert counts[0] == len(PROMPTS)


@pytest.mark.parametrize("name", ["reads", "adds", "scales"])
def test_a_form(tapped: VLLM, name: str) -> None:
    jobs = form_of(tapped, FORMS[name])
    with recorded(tapped), counted(tapped) as counts:
        alone, together = alone_and_together(tapped, lambda: left(tapped, jobs()))
    assert_same(together, alone, name)
    assert counts[0] == len(PROMPTS)
