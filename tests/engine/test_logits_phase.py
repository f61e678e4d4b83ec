"""Caps and scales of the logits are applied once, wherever logits are made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import models
from tests.architectures.configs import WIDTH
from tests.architectures.conftest import engine
from tests.architectures.reference import oracle
from tests.architectures.tiny import tiny
from tests.engine.helpers import PROMPT, assert_close

OPERATIONS = {"gemma2": ["truediv_0", "torch_tanh_0", "mul_0"], "granite": ["mul_1"]}


@pytest.fixture(scope="module", params=list(OPERATIONS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name: str, engines: Any) -> Iterator[Any]:
    with engine(engines, name, "float32") as made:
        yield made


def processed(name: str, raw: torch.Tensor) -> torch.Tensor:
    """What the architecture makes of the unembedding's product."""
    config = oracle(name).config
    if name == "gemma2":
        return torch.tanh(raw / config.final_logit_softcapping) * config.final_logit_softcapping
    return raw / config.logits_scaling


def of_transformers(name: str, rows: torch.Tensor) -> torch.Tensor:
    head = oracle(name).get_output_embeddings()
    with torch.no_grad():
        return processed(name, head(rows))


def test_the_config_has_something_to_apply(name: str) -> None:
    raw = torch.linspace(-20, 20, 5)
    assert not torch.allclose(processed(name, raw), raw, rtol=0.05)


def test_unembed_is_the_model_s_own_last_step(name: str, model: Any) -> None:
    rows = 3 * torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        early = model.unembed(rows).save()
        last = model.unembed(model.final_norm[-1:]).save()
        beside = model.unembed(rows).save()
        logits = model.logits.save()
        late = model.unembed(rows).save()
    for found in (early, beside, late):
        assert_close(found, of_transformers(name, rows))
    assert_close(last, logits, bound=1e-6)
    with torch.no_grad():
        ids = torch.tensor([models.encode(tiny(name), PROMPT)])
        assert_close(logits, oracle(name)(ids).logits[0, -1:])


def test_operations_of_the_logits_processor(name: str, model: Any) -> None:
    rows = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        source = model.logits_processor.source
        raw = source.self__get_logits_0.output.save()
        in_between = model.unembed(rows).save()
        values = [getattr(source, each).output for each in OPERATIONS[name]].save()
        output = model.logits_processor.output.save()
        logits = model.logits.save()
    assert_close(values[-1], processed(name, raw))
    assert torch.equal(values[-1], output)
    assert torch.equal(output, logits)
    assert_close(in_between, of_transformers(name, rows))


def test_an_edit_before_caps_and_scales(name: str, model: Any) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        raw = model.logits_processor.source.self__get_logits_0.output
        raw[:, 3] = 50.0
        given = raw.clone().save()
        logits = model.logits.save()
    assert_close(logits, processed(name, given))


def test_a_skipped_operation(name: str, model: Any) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=1):
        source = model.logits_processor.source
        operation = getattr(source, OPERATIONS[name][-1])
        raw = operation.input.save()
        operation.skip(raw)
        logits = model.logits.save()
    assert torch.equal(logits, raw)
