"""Edits that tables do in the graphs of two ranks give what eager steps on two ranks give: `--engine two-ranks`.

On the CPU there are no graphs: the taps of both ranks are told that they are in one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

from insitu import VLLM
from insitu.block import LocationError
from tests.engine.cohorts import alone_and_together, counted, run_together
from tests.engine.edits import steer, tokens_of
from tests.engine.helpers import completed, enqueue
from tests.engine.taps import PROMPTS, SETTINGS, Block, as_if_recorded, assert_same, name_of
from tests.engine.test_abort import before_steps
from tests.engine.test_cohorts_steps import WIDTH, steers_every_step
from tests.engine.test_cohorts_taps import (
    ELSE,
    IN_TABLES,
    OTHER_WAYS,
    edits_what_was_left,
    mixed,
    own_directions,
    own_vectors,
)
from tests.engine.test_taps import IN_TABLES as IN_TABLES_ALONE
from tests.engine.test_taps_ahead import AHEAD, add_and_keep

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_ranks")]

MANY = [[*PROMPTS[i % 4], 10 + i] for i in range(6)]
STEPS = 5
V, W = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def model(tapped_on_ranks: Any) -> Iterator[Any]:
    tapped_on_ranks.vllm_entrypoint.collective_rpc(as_if_recorded, args=(True,))
    yield tapped_on_ranks
    assert tapped_on_ranks.in_flight() == 0
    tapped_on_ranks.vllm_entrypoint.collective_rpc(as_if_recorded, args=(False,))


def str_or_name(value: Any) -> str:
    return name_of(value) if callable(value) else str(value)


def table_edits(model: VLLM, work: Callable[[], Any]) -> int:
    """The rows that tables edit in ``work``, whose steps are known by then."""
    work(), work()
    before = model.stats()
    work()
    after = model.stats()
    assert after.eager_steps - before.eager_steps <= 1  # the first, of which a table has no rows
    return after.table_edits - before.table_edits


@pytest.mark.parametrize("made", [steers_every_step, *IN_TABLES, *ELSE])
def test_one_run_for_many_gives_what_each_alone_gives_by_eager_steps(
    model: VLLM, llama: VLLM, made: Callable[[VLLM], Callable[[Any], Any]]
) -> None:
    settings = {"temperature": 0.0, "max_tokens": STEPS, "ignore_eos": True}
    wanted = llama.run(made(llama), MANY, **settings)
    with counted(model) as counts:
        alone, together = alone_and_together(model, lambda: model.run(made(model), MANY, **settings))
        again = model.run(made(model), MANY, **settings)
    assert counts == [2 * len(MANY), 2 * len(MANY)]
    for found, what in ((alone, "alone"), (together, "together"), (again, "again")):
        assert not isinstance(found, BaseException), found
        assert_same(found, wanted, what)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("made", [steers_every_step, *IN_TABLES])
def test_tables_do_each_step(model: VLLM, made: Callable[[VLLM], Callable[[Any], Any]], together: bool) -> None:
    if made is edits_what_was_left and not together:
        pytest.skip("waits for what it edits once it has gone on, on one rank too")
    run_together(model, together)
    try:
        settings = {"temperature": 0.0, "max_tokens": STEPS, "ignore_eos": True}
        edits = table_edits(model, lambda: model.run(made(model), MANY, **settings))
    finally:
        run_together(model, True)
    assert edits >= len(MANY) * (STEPS - 1)


@pytest.mark.parametrize(
    ("block", "count"), [*product(AHEAD, [1, 14]), *product(IN_TABLES_ALONE, [1, 4])], ids=str_or_name
)
def test_blocks_that_run_ahead_of_their_requests(model: VLLM, llama: VLLM, block: Block, count: int) -> None:
    prompts = [[*PROMPTS[i % 4], 10 + i] for i in range(count)]
    settings = {**SETTINGS, "max_tokens": 9}
    wanted = llama.run(functools.partial(block, llama), prompts, **settings)
    for together in (True, False, False):
        run_together(model, together)
        try:
            assert_same(model.run(functools.partial(block, model), prompts, **settings), wanted, block.__name__)
        finally:
            run_together(model, True)


@pytest.mark.parametrize("lengths", [[5] * 6, [5, 2, 4, 5, 3, 1], [1, 1, 6, 6, 1, 3]], ids=str)
def test_each_has_a_vector_and_a_length_of_its_own(model: VLLM, llama: VLLM, lengths: list[int]) -> None:
    wanted = own_vectors(llama, lengths)
    before = model.stats().table_edits
    alone, together = alone_and_together(model, lambda: own_vectors(model, lengths))
    assert_same(alone, wanted, "alone")
    assert_same(together, wanted, "together")
    assert model.stats().table_edits > before


def test_each_has_a_direction_of_its_own_taken_out(model: VLLM, llama: VLLM) -> None:
    wanted = own_directions(llama)
    alone, together = alone_and_together(model, lambda: own_directions(model))
    assert_same(alone, wanted, "alone")
    assert_same(together, wanted, "together")
    assert table_edits(model, lambda: own_directions(model)) > 0


def steered(model: VLLM, count: int) -> Any:
    """Of more requests than the engine runs at once, so that some begin where others are in the midst of theirs."""
    own = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(4))
    with model.trace(temperature=0.0, ignore_eos=True) as tracer:
        for number in range(count):
            with tracer.invoke([*PROMPTS[number % 4], 10 + number], max_tokens=2 + 5 * number % 7):
                seen = [].save()
                for _ in tracer.iter[:]:
                    model.resid_post[1] += own[number]
                    y = model.resid_post[2]
                    y *= 0.5
                    y -= (y @ V).unsqueeze(-1) * W / 64
                    seen.append(model.resid_post[3][-1])
                    seen.append(model.logits)
    return seen


def test_requests_that_begin_while_others_are_edited(model: VLLM, llama: VLLM) -> None:
    wanted = steered(llama, 40)
    before = model.stats().table_edits
    alone, together = alone_and_together(model, lambda: steered(model, 40))
    assert_same(alone, wanted, "alone")
    assert_same(together, wanted, "together")
    assert model.stats().table_edits > before


@pytest.mark.parametrize("other", OTHER_WAYS)
def test_steps_that_go_other_ways_beside_edits_of_tables(model: VLLM, llama: VLLM, other: str) -> None:
    wanted = mixed(llama, other)
    for together in (True, False, True, False):
        run_together(model, together)
        try:
            assert_same(mixed(model, other), wanted, f"{other}, together: {together}")
        finally:
            run_together(model, True)


@pytest.mark.usefixtures("no_edits_left")
def test_an_installed_edit_is_done_by_tables(model: VLLM, llama: VLLM) -> None:
    found = []
    for engine in (llama, model, model):
        before = engine.stats().table_edits
        edit = steer(engine, V)
        try:
            enqueue(engine, MANY, [5, 3, 4, 5, 2, 5])
            found.append(list(map(tokens_of, completed(engine))))
        finally:
            edit.clear()
        edits = engine.stats().table_edits - before
    assert found[0] == found[1] == found[2]
    assert edits >= sum([5, 3, 4, 5, 2, 5]) - 6


def test_untraced_requests_beside_are_not_edited(model: VLLM, llama: VLLM) -> None:
    prompts = [[20 + i, 3 + i % 50, 7] for i in range(64)]
    enqueue(llama, prompts, [6] * 64)
    wanted, own = list(map(tokens_of, completed(llama))), steered(llama, 8)
    for _ in range(2):
        enqueue(model, prompts, [6] * 64)
        before = model.stats().table_edits
        assert_same(steered(model, 8), own, "traced")
        assert list(map(tokens_of, completed(model))) == wanted
    assert model.stats().table_edits > before


@pytest.mark.parametrize("together", [True, False])
def test_requests_that_are_aborted(model: VLLM, llama: VLLM, together: bool) -> None:
    engine = model.vllm_entrypoint.llm_engine

    def abort(step: int) -> None:
        if step == 3:
            engine.abort_request(list(engine.output_processor.request_states)[1:3], internal=True)

    wanted = own_vectors(llama, [6] * 6)
    run_together(model, together)
    try:
        own_vectors(model, [6] * 6)
        for _ in range(2):
            with before_steps(model, abort), pytest.raises(BaseExceptionGroup) as told:  # noqa: F821
                own_vectors(model, [6] * 6)
            assert [error.invoke for error in told.value.exceptions] == [1, 2]  # type: ignore[attr-defined]
            assert model.in_flight() == 0
        assert_same(own_vectors(model, [6] * 6), wanted, "afterwards")
    finally:
        run_together(model, True)


def test_an_error_in_a_block_is_its_own(model: VLLM, llama: VLLM) -> None:
    def run(engine: VLLM, failing: int | None) -> Any:
        with engine.trace(**SETTINGS) as tracer:
            seen = [].save()
            for number, prompt in enumerate(MANY):
                with tracer.invoke(prompt):
                    for step in tracer.iter[:]:
                        engine.resid_post[1] += V
                        seen.append((number, step, engine.resid_post[3]))
                        if number == failing and step == 2:
                            raise ZeroDivisionError
        return [value for _, _, value in sorted(seen, key=lambda each: each[:2])]

    wanted = run(llama, None)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError) as caught:
            run(model, 3)
        assert caught.value.invoke == 3  # type: ignore[attr-defined]
        assert model.in_flight() == 0
    assert_same(run(model, None), wanted, "afterwards")


def test_a_stop_ends_a_block_that_is_ahead(model: VLLM) -> None:
    def stop(tracer: Any) -> Any:
        rows = []
        for step in tracer.iter[:]:
            model.resid_post[1] += 1
            rows.append(model.resid_post[3])
            if step == 3:
                tracer.stop()
        return rows, tracer.result

    for _ in range(2):
        rows, result = model.run(stop, PROMPTS[0], **{**SETTINGS, "max_tokens": 12})
        assert len(rows) == len(result.outputs[0].token_ids) == 4
        assert all(row.isfinite().all() for row in rows)


def test_plain_steps_after_edits_are_plain(model: VLLM, llama: VLLM) -> None:
    """Of one request that goes on when its block, and all others', have ended."""

    def first_steps(engine: VLLM) -> Any:
        with engine.trace(**{**SETTINGS, "max_tokens": 9}) as tracer:
            for number, prompt in enumerate(MANY):
                with tracer.invoke(prompt):
                    result = None
                    for _ in tracer.iter[: 3 + number % 3]:
                        engine.resid_post[1] += V * 3
                    result = tracer.result.save()
        return result

    wanted = [tokens_of(each) for each in first_steps(llama)]
    for _ in range(3):
        assert [tokens_of(each) for each in first_steps(model)] == wanted
    wanted, _ = llama.run(functools.partial(add_and_keep, llama), PROMPTS[0], **SETTINGS)
    assert_same(model.run(functools.partial(add_and_keep, model), PROMPTS[0], **SETTINGS)[0], wanted, "afterwards")


def spoil_table(worker: Any, spoilt: bool) -> None:
    """In a worker that follows: a table multiplies by something else than it is told."""
    from insitu.engine.taps.tables import Table

    if not worker.rank:
        return
    if not spoilt:
        Table.edit_and_copy = Table.right
        return
    Table.right = right = Table.edit_and_copy

    def wrong(table: Table, tensors: Any, copies: Any) -> None:
        table.factors[:, [0, 4]] = 1.5
        right(table, tensors, copies)

    Table.edit_and_copy = wrong


def test_a_table_of_another_rank_that_edits_otherwise_is_refused(model: VLLM) -> None:
    model.run(functools.partial(add_and_keep, model), PROMPTS[0], **SETTINGS)
    engine: Any = model._engine
    assert engine.taps()
    model.vllm_entrypoint.collective_rpc(spoil_table, args=(True,))
    try:
        with pytest.raises(LocationError, match=r"the table of `model\.layers\.0\.output` edits rows otherwise"):
            engine.taps()
    finally:
        model.vllm_entrypoint.collective_rpc(spoil_table, args=(False,))
    assert engine.taps()
