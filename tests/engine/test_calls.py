"""What a traced request costs in calls, which a busy machine counts as a quiet one does."""

from __future__ import annotations

import pytest

from benchmarks.calls import measured
from insitu import VLLM

pytestmark = pytest.mark.in_process  # other engines run each block alone

COUNT = 64


def test_a_request_in_company_makes_few_calls(llama: VLLM) -> None:
    measured(llama, COUNT)
    found = {name: calls.total() / COUNT for name, calls in measured(llama, COUNT).items()}
    assert found["one place, function"] < found["plain vLLM"], found
    assert found["one place, invokes"] < found["plain vLLM"] + 60, found
    assert found["four places"] - found["one place, invokes"] < 150, found


def test_calls_do_not_grow_with_the_company(llama: VLLM) -> None:
    few, many = (measured(llama, count) for count in (16, 128))
    for name in few:
        assert many[name].total() / 128 < few[name].total() / 16 * 1.05, name
