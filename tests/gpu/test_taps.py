"""Taps in CUDA graphs: what blocks see and do there is what they see and do by eager steps, within bfloat16's rounding.

The blocks are those of the CPU's tests; one token alone is allowed, so that rounding can't lead two runs apart.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

import insitu
from tests.engine.taps import PLACES, PROMPTS, SETTINGS, Block, flat, name_of
from tests.engine.test_taps import BLOCKS, in_one_batch, read_streams, replace_output
from tests.engine.test_taps_ahead import AHEAD

pytestmark = pytest.mark.gpu

FORCED = {**SETTINGS, "allowed_token_ids": [77], "detokenize": False}
BOUND = 0.04


@pytest.fixture(scope="module")
def engines(folder: str) -> Iterator[tuple[Any, Any]]:
    arguments = {"dtype": "bfloat16", "max_model_len": 1024, "gpu_memory_utilization": 0.1, "max_num_seqs": 64}
    arguments |= {"skip_tokenizer_init": True, "dispatch": True, "kv_cache_memory_bytes": 2**30}
    with insitu.VLLM(folder, taps=PLACES, **arguments) as tapped, insitu.VLLM(folder, **arguments) as untapped:
        config = tapped.vllm_entrypoint.llm_engine.vllm_config.compilation_config
        assert config.cudagraph_mode.has_full_cudagraphs()
        yield tapped, untapped


def assert_same(ours: Any, wanted: Any, what: str) -> None:
    ours, wanted = flat(ours), flat(wanted)
    assert len(ours) == len(wanted) > 0
    for i, (one, two) in enumerate(zip(ours, wanted, strict=True)):
        assert one.shape == two.shape
        one, two = one.float(), two.float()
        assert ((one - two).norm() / two.norm()).item() < BOUND, f"{what}, value {i}"


@pytest.mark.parametrize("block", BLOCKS, ids=name_of)
def test_a_block_gives_what_it_gives_by_eager_steps(engines: Any, block: Block) -> None:
    for _ in range(2):
        ours, wanted = [each.run(functools.partial(block, each), PROMPTS[0], **FORCED) for each in engines]
        assert_same(ours, wanted, block.__name__)


def test_blocks_of_all_kinds_in_one_batch(engines: Any) -> None:
    for ours, wanted, block in zip(*(in_one_batch(each, FORCED) for each in engines), BLOCKS, strict=True):
        assert_same(ours, wanted, block.__name__)


@pytest.mark.parametrize("block", AHEAD, ids=name_of)
def test_blocks_that_run_ahead_of_their_requests(engines: Any, block: Block) -> None:
    settings = {**FORCED, "max_tokens": 24}
    prompts = [[*PROMPTS[i % 4], 10 + i] for i in range(24)]
    for _ in range(3):
        ours, wanted = [each.run(functools.partial(block, each), prompts, **settings) for each in engines]
        assert_same(ours, wanted, block.__name__)


def test_reads_and_edits_leave_the_graphs_on(engines: Any) -> None:
    model = engines[0]
    for block in (read_streams, replace_output):
        model.run(functools.partial(block, model), PROMPTS[0], **FORCED)
        before = model.stats()
        model.run(functools.partial(block, model), PROMPTS[0], **FORCED)
        after = model.stats()
        assert (after.eager_steps - before.eager_steps, after.tapped_steps - before.tapped_steps) == (0, 5)
    assert 0 < after.tap_bytes < 2**26
