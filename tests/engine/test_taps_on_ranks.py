"""Taps of a model on two ranks give what eager steps on two ranks give: `pytest --engine two-ranks`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from insitu.block import InsituError, LocationError, UnknownModuleError
from tests.engine import cohorts
from tests.engine.cohorts import alone_and_together, counted
from tests.engine.helpers import own_engine, plain
from tests.engine.taps import PROMPTS, SETTINGS, Block, as_if_recorded, assert_same, name_of
from tests.engine.test_cohorts_steps import GREEDY, adds_up, reads_every_step, steers_every_step
from tests.engine.test_taps import BLOCKS, in_one_batch, read_streams

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_ranks")]


@pytest.fixture(params=["between pieces", "recorded"])
def model(request: pytest.FixtureRequest, tapped_on_ranks: Any) -> Iterator[Any]:
    tapped_on_ranks.vllm_entrypoint.collective_rpc(as_if_recorded, args=(request.param == "recorded",))
    yield tapped_on_ranks
    tapped_on_ranks.vllm_entrypoint.collective_rpc(as_if_recorded, args=(False,))


@pytest.mark.parametrize("block", BLOCKS, ids=name_of)
def test_a_block_gives_what_it_gives_by_eager_steps(model: Any, llama: Any, block: Block) -> None:
    for _ in range(2):  # the second time it is known what the block does
        for prompt in PROMPTS[:2]:
            ours, wanted = [each.run(functools.partial(block, each), prompt, **SETTINGS) for each in (model, llama)]
            assert_same(ours, wanted, block.__name__)


def test_blocks_of_all_kinds_in_one_batch(model: Any, llama: Any) -> None:
    for _ in range(2):
        for ours, wanted, block in zip(
            in_one_batch(model, SETTINGS), in_one_batch(llama, SETTINGS), BLOCKS, strict=True
        ):
            assert_same(ours, wanted, block.__name__)


@pytest.mark.parametrize("made", [reads_every_step, steers_every_step, adds_up])
def test_a_block_runs_once_for_many(model: Any, made: Callable[[Any], Callable[[Any], Any]]) -> None:
    with counted(model) as counts:
        alone, together = alone_and_together(
            model, lambda: model.run(made(model), cohorts.PROMPTS, ignore_eos=True, **GREEDY)
        )
    assert counts == [len(cohorts.PROMPTS), 2 * len(cohorts.PROMPTS)]
    assert_same(together, alone, made.__name__)


def test_reading_takes_no_eager_step(model: Any) -> None:
    for _ in range(2):
        before = model.stats()
        model.run(functools.partial(read_streams, model), PROMPTS[0], **SETTINGS)
    after = model.stats()
    assert (after.eager_steps - before.eager_steps, after.tapped_steps - before.tapped_steps) == (0, 5)
    plain(model, PROMPTS)
    assert model.stats().tapped_steps == after.tapped_steps


@pytest.mark.parametrize(
    ("taps", "error", "text"),
    [
        (["model.layers.*.mpl.output"], UnknownModuleError, r"model\.layers\.\*\.mlp"),
        (["resid_post[1]", "model.layers.1.self_attn.qkv_proj.output"], LocationError, "lies in parts on the ranks"),
        (["model.layers.2.mlp.down_proj.input"], LocationError, r"`model\.layers\.2\.mlp\.down_proj\.input` lies in"),
    ],
)
def test_a_tap_that_can_not_be_is_refused_by_name(
    engines: Any, taps: list[str], error: type[InsituError], text: str
) -> None:
    with pytest.raises(error, match=text):
        with own_engine(engines, "llama", tensor_parallel_size=2, taps=taps):
            pass
