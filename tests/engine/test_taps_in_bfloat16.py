"""Taps in the dtype that engines on GPUs have: what the self-test of tables makes of it, and edits that they do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from insitu.engine.taps.tables import Table, Vectors
from tests.engine.helpers import own_engine
from tests.engine.taps import PLACES, Block, flat, name_of, recorded, taps_of
from tests.engine.test_taps import add_in_place, edit_and_keep, project_out

pytestmark = [pytest.mark.in_process, pytest.mark.slow]

SETTINGS = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "allowed_token_ids": [77]}
"""One token alone, so that rounding can't lead two engines apart."""
PROMPTS = [[5, 90, 33, 400, number] for number in range(3, 11)]
ROUNDING, FURTHER = 0.05, 1.5
"""How far engines in bfloat16 are from float32, by norm; and how much further tables may be than eager steps."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_table_is_without_fault(dtype: torch.dtype, tensors: int, rows: int) -> None:
    table = Table(rows, Vectors(8, 64, torch.device("cpu")))
    assert 0 <= table.fault([torch.zeros(rows, 64, dtype=dtype)] * tensors) < 1e-6


@pytest.fixture(scope="module")
def pair(engines: Any) -> Iterator[tuple[Any, Any]]:
    """An engine with taps and one without."""
    common: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 16}
    with own_engine(engines, "llama", enforce_eager=False, taps=PLACES, **common) as tapped:
        with own_engine(engines, "llama", **common) as eager:
            yield tapped, eager


def test_the_engine_finds_no_fault(pair: tuple[Any, Any]) -> None:
    with recorded(pair[0]):
        pair[0].run(lambda tracer: pair[0].resid_post[1], PROMPTS[0], **SETTINGS)
        faults = taps_of(pair[0]).faults()
    assert len(faults) == len(taps_of(pair[0]).places)
    assert all(0 <= fault < 0.005 for fault in faults)


def scale_and_set(model: Any, tracer: Any) -> Any:
    kept = []
    for _ in tracer.iter[:]:
        model.resid_post[1] *= 0.5
        model.resid_post[1] += 0.25
        model.resid_post[2][:] = 0.125
        kept.append(model.logits)
    return kept


@pytest.mark.parametrize("block", [add_in_place, scale_and_set, project_out, edit_and_keep], ids=name_of)
@pytest.mark.parametrize("count", [1, len(PROMPTS)], ids=["alone", "together"])
def test_tables_are_as_near_to_float32_as_eager_steps(
    pair: tuple[Any, Any], llama: Any, block: Block, count: int
) -> None:
    tapped, eager = pair

    def run(model: Any) -> torch.Tensor:
        values = model.run(lambda tracer: block(model, tracer), PROMPTS[:count], **SETTINGS)
        return torch.cat([each.float().flatten() for each in flat(values)])

    wanted = run(llama)
    by_steps = ((run(eager) - wanted).norm() / wanted.norm()).item()
    with recorded(tapped):
        run(tapped)  # what places are like, and what the block does, is learnt
        before = tapped.stats().table_edits
        by_tables = ((run(tapped) - wanted).norm() / wanted.norm()).item()
        assert tapped.stats().table_edits > before
    assert by_steps < ROUNDING
    assert by_tables < FURTHER * by_steps
