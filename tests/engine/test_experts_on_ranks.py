"""What experts return on one rank is a summand: a block sees and writes the sum. `pytest --engine two-ranks`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engine.helpers import PROMPT, assert_close, hf, ids_of

SETTINGS = {"temperature": 0.0, "max_tokens": 1}


def call_the_method(worker: Any, call: bool) -> None:
    """In a worker: the experts' method is called as a module, as it is on a GPU."""
    for module in worker.model_runner.get_model().modules():
        if type(module).__name__ == "RoutedExperts":
            method: Any = module.quant_method
            for name in ("apply_monolithic", "forward"):
                vars(method).pop(name, None)
            if call:
                original = method.apply_monolithic
                method.forward = lambda original=original, **given: original(**given)
                method.apply_monolithic = lambda method=method, **given: method.forward(**given)


@pytest.fixture
def model(mixtral: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.config.getoption("--engine") != "two-ranks":
        pytest.skip("is about two ranks")
    rpc = mixtral.vllm_entrypoint.collective_rpc
    rpc(call_the_method, args=(True,))
    yield mixtral
    rpc(call_the_method, args=(False,))


def test_the_sum_is_read_and_written(model: Any) -> None:
    wanted = hf("mixtral", ids_of("mixtral"))["model.layers.1.mlp.experts"].output
    experts = model.model.layers[1].block_sparse_moe.experts
    with model.trace(PROMPT, **SETTINGS):
        own = experts.routed_experts.quant_method.output.save()
        whole = experts.output.save()
    assert_close(own, wanted)
    assert_close(whole, wanted)
    with model.trace(PROMPT, **SETTINGS):
        experts.routed_experts.quant_method.output[:] = torch.arange(own.shape[-1])
        whole = experts.output.save()
    assert torch.equal(whole, torch.arange(own.shape[-1]).to(whole).expand_as(whole))
