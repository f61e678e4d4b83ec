"""Blocks that run once for many requests at places that the compiled model serves: what each request gets is what it
gets alone, by eager steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from insitu import VLLM
from tests.engine.cohorts import PROMPTS, alone_and_together, counted, host_of
from tests.engine.edits import tokens_of
from tests.engine.helpers import completed, enqueue
from tests.engine.taps import assert_same, recorded, taps_of
from tests.engine.test_abort import before_steps
from tests.engine.test_cohorts import trace_of
from tests.engine.test_cohorts_steps import (
    BLOCKS,
    GREEDY,
    STEPS,
    WIDTH,
    programs,
    reads_every_step,
    steers_every_step,
)

pytestmark = [pytest.mark.slow, pytest.mark.in_process, pytest.mark.usefixtures("several_threads")]


@pytest.fixture(params=["between pieces", "recorded"])
def model(request: pytest.FixtureRequest, tapped: Any) -> Iterator[Any]:
    with recorded(tapped) if request.param == "recorded" else nullcontext():
        yield tapped


@contextmanager
def stepped(model: VLLM) -> Iterator[list[int]]:
    """How many steps in here were eager, and how many were served at taps."""
    before, counts = model.stats(), [0, 0]
    yield counts
    after = model.stats()
    counts[:] = [after.eager_steps - before.eager_steps, after.tapped_steps - before.tapped_steps]


V, W = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(3))
OWN = torch.randn(len(PROMPTS), WIDTH, generator=torch.Generator().manual_seed(4))


def adds_and_keeps(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        seen = []
        for _ in tracer.iter[:]:
            model.resid_post[1] += V
            seen.append(model.resid_post[1])
            seen.append(model.resid_post[3])
        return seen

    return block


def edits_many_places(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        seen = []
        for step in tracer.iter[:]:
            model.resid_post[0] *= 0.5
            x = model.resid_post[1]
            x -= V * 2
            x /= 2
            seen.append(x)
            if step % 2:
                model.resid_post[2][:] = W
            else:
                model.resid_post[2][-1] += V
            seen += [model.resid_post[2], model.logits[0]]
        return seen

    return block


def edits_a_part(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        seen = []
        for _ in tracer.iter[:]:
            hidden = model.model.layers[1].output[0]
            hidden[:] += V
            later = model.resid_post[2]
            later[:] *= 2
            seen += [hidden, later, model.logits]
        return seen

    return block


def edits_an_output(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        seen = []
        for _ in tracer.iter[:]:
            mlp = model.model.layers[1].mlp.output
            mlp[:] += W
            mlp[:] -= 0.25
            seen.append(mlp)
            seen.append(model.model.norm.output[0])
        return seen

    return block


def replaces(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        seen = []
        for _ in tracer.iter[:]:
            model.resid_post[1] = model.resid_post[1] * 2 + V
            seen += [model.resid_post[1], model.logits]
        return seen

    return block


def edits_what_was_used(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        seen = []
        for _ in tracer.iter[:]:
            x = model.resid_post[1]
            doubled = x * 2
            x += V
            seen += [doubled, x, model.logits]
        return seen

    return block


def edits_what_was_left(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        seen = []
        for _ in tracer.iter[:]:
            first = model.resid_post[0]
            second = model.resid_post[2]
            first += 1
            second -= V
            seen += [first, second, model.logits]
        return seen

    return block


def adds_what_it_saw_before(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        seen = []
        total = V * 1
        for _ in tracer.iter[1:]:
            model.resid_post[1] += total * 0.5 if not seen else seen[-1]
            last = model.resid_post[3][-1] * 0.1
            seen.append(last)
            seen[-1] += 1
        return seen

    return block


def adds_the_place_before(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        seen = []
        for _ in tracer.iter[:]:
            first = model.resid_post[0]
            model.resid_post[2] += first
            seen += [model.resid_post[3], first]
        return seen

    return block


def leaves_the_taps(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        seen = []
        for step in tracer.iter[:]:
            model.resid_post[1] += V
            if step > 2:
                seen.append(model.mlp_out[2])
            seen.append(model.logits)
        return seen

    return block


def edits_logits(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        seen = []
        for _ in tracer.iter[:]:
            model.resid_post[1] += V
            logits = model.logits
            logits[:] *= 2
            seen += [logits, model.samples]
        return seen

    return block


def projects_out(model: VLLM) -> Callable[[Any], Any]:
    unit = V / V.norm()

    def block(tracer: Any) -> Any:
        seen = []
        for _ in tracer.iter[:]:
            model.resid_post[0] *= 2
            x = model.resid_post[0]
            x += W
            x -= (x @ unit).unsqueeze(-1) * unit
            x = model.resid_post[1]
            x[:] = x - 0.5 * (x @ unit)[..., None] * unit
            seen.append(x)
            x = model.resid_post[2]
            x -= torch.outer(x @ unit, unit)
            seen += [model.resid_post[3], model.logits[0]]
        return seen

    return block


def projects_out_elsewise(model: VLLM) -> Callable[[Any], Any]:
    unit = V / V.norm()

    def block(tracer: Any) -> Any:
        seen = []
        for _ in tracer.iter[:]:
            x = model.resid_post[0]
            x[:] = -((x * unit).sum(-1, keepdim=True) * W - x)
            mlp = model.model.layers[1].mlp.output
            mlp[:] -= (mlp @ unit[:, None]) @ unit[None]
            seen.append(mlp)
            x = model.resid_post[2]
            x[:] = x.float() - (x.float() @ W)[:, None] * unit / 8
            x /= 2
            seen += [x, model.resid_post[3], model.logits[0]]
        return seen

    return block


def keeps_what_it_projects_out(model: VLLM) -> Callable[[Any], Any]:
    unit = V / V.norm()

    def block(tracer: Any) -> Any:
        seen = []
        for _ in tracer.iter[:]:
            x = model.resid_post[1]
            along = x @ unit
            x -= along[:, None] * unit
            seen.append(along / 64)  # products of long rows, in which rounding is as long
            y = model.resid_post[2]
            y += W
            seen += [(y @ unit) / 64, (y * unit).sum(-1) / 64, model.logits[0]]
        return seen

    return block


def projects_two_out(model: VLLM) -> Callable[[Any], Any]:
    unit, other = V / V.norm(), W / W.norm()

    def block(tracer: Any) -> Any:
        seen = []
        for _ in tracer.iter[:]:
            x = model.resid_post[1]
            x -= (x @ unit)[:, None] * unit
            x -= (x @ other)[:, None] * other
            y = model.resid_post[2]
            without = y - (y @ unit)[:, None] * unit
            y *= 2
            y += without
            seen += [model.resid_post[3], model.logits[0]]
        return seen

    return block


def uses_at_a_place_what_it_made_before(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        seen = []
        for _ in tracer.iter[:]:
            first = model.resid_post[0]
            doubled = first * 2
            model.resid_post[2] += V
            seen += [-doubled, doubled.float(), model.logits[0]]
        return seen

    return block


def adds_what_it_changes_afterwards(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        seen = []
        kept = model.resid_post[3][-1] * 0.1
        for step in tracer.iter[1:]:
            model.resid_post[1] += kept
            model.resid_post[2][:] -= kept
            kept *= 0.5
            if step == 2:
                kept += V
            seen.append(model.logits)
        return seen

    return block


def takes_out_what_it_changes_afterwards(model: VLLM) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        seen = []
        kept = model.resid_post[3][-1] * 0.02
        for _ in tracer.iter[1:]:
            x = model.resid_post[1]
            x -= (x @ V).unsqueeze(-1) * kept
            seen.append(model.resid_post[3])
            kept *= 0.5
        return seen

    return block


IN_TABLES = [adds_and_keeps, edits_many_places, edits_an_output, edits_what_was_left, edits_logits]
IN_TABLES += [projects_out, projects_out_elsewise, replaces]
IN_TABLES += [adds_what_it_changes_afterwards, takes_out_what_it_changes_afterwards]
ELSE = [edits_a_part, edits_what_was_used, adds_what_it_saw_before, adds_the_place_before, leaves_the_taps]
ELSE += [keeps_what_it_projects_out, projects_two_out, uses_at_a_place_what_it_made_before]


@pytest.mark.parametrize("made", [*BLOCKS, *IN_TABLES, *ELSE])
def test_values_are_those_of_each_alone_by_eager_steps(
    model: VLLM, llama: VLLM, made: Callable[[VLLM], Callable[[Any], Any]]
) -> None:
    run = lambda engine: engine.run(made(engine), PROMPTS, ignore_eos=True, **GREEDY)  # noqa: E731
    wanted, _ = alone_and_together(llama, lambda: run(llama))
    with counted(model) as counts:
        alone, together = alone_and_together(model, lambda: run(model))
        again = run(model)
    assert counts == [2 * len(PROMPTS), 2 * len(PROMPTS)]
    for found, what in ((alone, "alone"), (together, "together"), (again, "again")):
        assert not isinstance(found, BaseException), found
        assert_same(found, wanted, what)


@pytest.mark.parametrize("made", [reads_every_step, steers_every_step, *IN_TABLES])
def test_tables_and_copies_are_enough_for_each_step(tapped: VLLM, made: Callable[[VLLM], Callable[[Any], Any]]) -> None:
    with recorded(tapped):
        run = lambda: tapped.run(made(tapped), PROMPTS, ignore_eos=True, **GREEDY)  # noqa: E731
        run(), run()
        with stepped(tapped) as steps, counted(tapped) as counts:
            run()
        assert counts == [len(PROMPTS), 0]
        assert steps[0] <= 1  # the first, of which a table has no rows
        assert sum(steps) >= STEPS


def own_directions(model: VLLM) -> Any:
    with model.trace(temperature=0.0, ignore_eos=True, max_tokens=STEPS) as tracer:
        for prompt, vector in zip(PROMPTS, OWN / OWN.norm(dim=-1, keepdim=True), strict=True):
            with tracer.invoke(prompt):
                seen = [].save()
                for _ in tracer.iter[:]:
                    model.resid_post[1] += vector * 0.5
                    x = model.resid_post[1]
                    x -= (x @ vector).unsqueeze(-1) * vector
                    y = model.resid_post[2]
                    y[:] = y - torch.outer(y @ vector, V)
                    seen.append(model.resid_post[3][-1])
                    seen.append(model.resid_post[3] @ vector / 64)
                    seen.append(model.logits)
    return seen


def test_each_has_a_direction_of_its_own_taken_out(model: VLLM, llama: VLLM) -> None:
    wanted, _ = alone_and_together(llama, lambda: own_directions(llama))
    with counted(model) as counts:
        alone, together = alone_and_together(model, lambda: own_directions(model))
        again = own_directions(model)
    assert counts == [2 * len(PROMPTS), 2 * len(PROMPTS)]
    for found, what in ((alone, "alone"), (together, "together"), (again, "again")):
        assert not isinstance(found, BaseException), found
        assert_same(found, wanted, what)


def test_directions_of_their_own_are_in_tables(tapped: VLLM) -> None:
    with recorded(tapped):
        own_directions(tapped), own_directions(tapped)
        with stepped(tapped) as steps, counted(tapped) as counts:
            own_directions(tapped)
    assert counts == [len(PROMPTS), 0]
    assert steps[0] <= 1


def five_vectors_each(model: VLLM, count: int) -> Any:
    given = torch.randn(5, count, WIDTH, generator=torch.Generator().manual_seed(5))
    with model.trace(**GREEDY, ignore_eos=True) as tracer:
        for number, (a, b, c, d, e) in enumerate(zip(*given, strict=True)):
            with tracer.invoke([*PROMPTS[number % len(PROMPTS)], number]):
                seen = [].save()
                for _ in tracer.iter[:]:
                    model.resid_post[0] += a
                    x = model.resid_post[1]
                    x -= torch.outer(x @ b, c) / 64
                    model.resid_post[2] += d
                    model.resid_post[3][:] -= e
                    seen.append(model.resid_post[3])
                    seen.append(model.logits)
    return seen


@pytest.mark.parametrize("together", [False, True])
def test_more_vectors_than_tables_have_room_for_are_added_in_pieces(
    tapped: VLLM, llama: VLLM, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    for model in (tapped, llama):
        monkeypatch.setattr(host_of(model), "together", together)
    with recorded(tapped):
        for count, tables in ((12, True), (14, False), (3, True), (16, False), (12, True)):
            wanted = five_vectors_each(llama, count)
            before = tapped.stats().table_edits
            assert_same(five_vectors_each(tapped, count), wanted, f"{5 * count} vectors of 64")
            assert bool(tapped.stats().table_edits - before) is tables, count


@pytest.mark.parametrize("together", [False, True])
def test_more_vectors_than_there_is_room_for_beside_blocks_that_wait(
    tapped: VLLM, llama: VLLM, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    """Steps run in pieces anyhow, for those whose edits tables can't do."""

    def beside_edits_of_elements(model: VLLM) -> Any:
        given = torch.randn(14, 5, WIDTH, generator=torch.Generator().manual_seed(5))
        with model.trace(**GREEDY, ignore_eos=True) as tracer:
            for number in range(16):
                with tracer.invoke([*PROMPTS[number % len(PROMPTS)], number]):
                    seen = [].save()
                    for _ in tracer.iter[:]:
                        if number < 14:
                            model.resid_post[0] += given[number, 0]
                            x = model.resid_post[1]
                            x -= torch.outer(x @ given[number, 1], given[number, 2]) / 64
                            model.resid_post[2] += given[number, 3]
                            model.resid_post[3][:] -= given[number, 4]
                        else:
                            model.resid_post[2][:, ::2] = 0
                        seen.append(model.logits)
        return seen

    for model in (tapped, llama):
        monkeypatch.setattr(host_of(model), "together", together)
    wanted = beside_edits_of_elements(llama)
    with recorded(tapped):
        for _ in range(3):
            assert_same(beside_edits_of_elements(tapped), wanted, "70 vectors of 64")


@pytest.mark.parametrize("together", [False, True])
def test_a_vector_that_numpy_changes_between_traces(
    model: VLLM, llama: VLLM, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    for engine in (model, llama):
        monkeypatch.setattr(host_of(engine), "together", together)
    vector = torch.zeros(WIDTH)

    def steered(engine: VLLM) -> Any:
        def block(tracer: Any) -> Any:
            logits = []
            for _ in tracer.iter[:]:
                engine.resid_post[1] += vector
                logits.append(engine.logits)
            return logits

        return engine.run(block, PROMPTS, **GREEDY, ignore_eos=True)

    for number in range(4):
        vector.numpy()[:] = OWN[number]  # no version tells of it
        assert_same(steered(model), steered(llama), f"vector {number}")


def own_vectors(model: VLLM, lengths: list[int], stops: list[int] | None = None) -> Any:
    with model.trace(temperature=0.0, stop_token_ids=stops or []) as tracer:
        for prompt, vector, length in zip(PROMPTS, OWN, lengths, strict=True):
            with tracer.invoke(prompt, max_tokens=length):
                seen = [].save()
                for _ in tracer.iter[:]:
                    model.resid_post[1] += vector
                    model.resid_post[2][:] += vector * 0.5
                    seen.append(model.resid_post[3][-1])
                    seen.append(model.logits)
    return seen


@pytest.mark.parametrize("lengths", [[5] * 6, [5, 2, 4, 5, 3, 1], [1, 1, 6, 6, 1, 3]], ids=str)
def test_each_has_a_vector_and_a_length_of_its_own(model: VLLM, llama: VLLM, lengths: list[int]) -> None:
    wanted, _ = alone_and_together(llama, lambda: own_vectors(llama, lengths))
    with counted(model) as counts:
        alone, together = alone_and_together(model, lambda: own_vectors(model, lengths))
        again = own_vectors(model, lengths)
    assert counts == [2 * len(PROMPTS), 2 * len(PROMPTS)]
    for found, what in ((alone, "alone"), (together, "together"), (again, "again")):
        assert_same(found, wanted, what)


def test_some_end_early(model: VLLM, llama: VLLM) -> None:
    drawn = llama.run(
        lambda tracer: [llama.samples.clone() for _ in tracer.iter[:]], PROMPTS, ignore_eos=True, **GREEDY
    )
    stops = [int(drawn[0][2]), int(drawn[3][1]), int(drawn[5][3])]
    lengths = [6] * len(PROMPTS)
    wanted, _ = alone_and_together(llama, lambda: own_vectors(llama, lengths, stops))
    alone, together = alone_and_together(model, lambda: own_vectors(model, lengths, stops))
    assert_same(alone, wanted, "alone")
    assert_same(together, wanted, "together")


def test_an_aborted_request_leaves_the_others(model: VLLM, llama: VLLM) -> None:
    engine = model.vllm_entrypoint.llm_engine

    def abort(step: int) -> None:
        if step == 2:
            engine.abort_request([list(engine.output_processor.request_states)[2]], internal=True)

    lengths = [5] * len(PROMPTS)
    wanted = own_vectors(llama, lengths)
    for _ in range(2):
        with before_steps(model, abort), pytest.raises(Exception) as told:
            own_vectors(model, lengths)
        assert told.value.invoke == 2  # type: ignore[attr-defined]
        assert model.in_flight() == 0
        assert not host_of(model).company.all
    assert_same(own_vectors(model, lengths), wanted, "afterwards")


@pytest.mark.parametrize("beside", ["taps alone", "a place without a tap", "an edit of its own"])
def test_blocks_of_other_kinds_in_the_same_steps(model: VLLM, llama: VLLM, beside: str) -> None:
    def work(engine: VLLM) -> Any:
        with engine.trace(temperature=0.0, ignore_eos=True) as tracer:
            for number, prompt in enumerate([*PROMPTS, *PROMPTS]):
                if number % 3 == 1:
                    with tracer.invoke(prompt, max_tokens=4):
                        odd = [].save()
                        for step in tracer.iter[:]:
                            if beside == "taps alone":
                                odd.append(engine.resid_post[2].cummax(0)[0])
                            elif beside == "a place without a tap":
                                odd.append(engine.mlp_out[2].cummax(0)[0] if step == 2 else engine.logits)
                            else:
                                engine.resid_post[1][:, ::2] = 0
                                odd.append(engine.resid_post[3].cummax(0)[0])
                else:
                    with tracer.invoke(prompt, max_tokens=5):
                        even = [].save()
                        for _ in tracer.iter[:]:
                            engine.resid_post[1] *= 0.5
                            even.append(engine.resid_post[1])
                            even.append(engine.logits[0])
        return odd, even  # pyright: ignore[reportPossiblyUnboundVariable]

    wanted, _ = alone_and_together(llama, lambda: work(llama))
    with counted(model) as counts:
        alone, together = alone_and_together(model, lambda: work(model))
        again = work(model)
    assert counts[0] >= 8
    for found, what in ((alone, "alone"), (together, "together"), (again, "again")):
        assert_same(found, wanted, f"{what}, beside {beside}")


OTHER_WAYS = ["leaves the taps", "edits elements", "calls a module"]


def mixed(model: VLLM, other: str) -> Any:
    """Some requests' blocks can be done by tables, those of others can't."""
    with model.trace(temperature=0.0, ignore_eos=True, max_tokens=5) as tracer:
        for number in range(12):
            if number % 3 == 1:
                with tracer.invoke([*PROMPTS[number % 6], 10 + number]):
                    odd = [].save()
                    for step in tracer.iter[:]:
                        if other == "edits elements":
                            model.resid_post[2][:, ::2] = 0
                            odd.append(model.resid_post[3].cummax(0)[0])
                        elif other == "calls a module":
                            odd.append(model.unembed(model.resid_post[0][-1:]))
                        else:
                            odd.append(model.resid_post[2].cummax(0)[0])
                            if step > 2:
                                odd.append(model.model.layers[3].mlp.down_proj.output[0].cummax(0)[0])
                        odd.append(model.logits)
            else:
                with tracer.invoke([*PROMPTS[number % 6], 10 + number]):
                    even = [].save()
                    for _ in tracer.iter[:]:
                        model.resid_post[1] *= 2
                        even.append(model.resid_post[1])
                        model.resid_post[3] *= 0.5
                        even.append(model.logits[0])
    return odd, even  # pyright: ignore[reportPossiblyUnboundVariable]


@pytest.mark.parametrize("other", OTHER_WAYS)
@pytest.mark.parametrize("together", [True, False])
def test_steps_that_go_other_ways_beside_edits_of_tables(
    model: VLLM, llama: VLLM, monkeypatch: pytest.MonkeyPatch, other: str, together: bool
) -> None:
    wanted = mixed(llama, other)
    taps_of(model).shown.__self__._habits._known.clear()  # nothing is known of what the blocks do
    monkeypatch.setattr(host_of(model), "together", together)
    with counted(model) as counts:
        for _ in range(2):
            assert_same(mixed(model, other), wanted, other)
    assert bool(counts[0]) is together


def test_what_a_block_has_changed_when_the_step_runs_again(model: VLLM, llama: VLLM) -> None:
    def work(engine: VLLM) -> Any:
        with engine.trace(temperature=0.0, ignore_eos=True, max_tokens=STEPS) as tracer:
            for prompt in PROMPTS:
                with tracer.invoke(prompt):
                    seen = [].save()
                    kept = engine.resid_post[3][-1] * 0.1
                    for _ in tracer.iter[1:]:
                        engine.resid_post[1] += kept
                        kept *= 0.5
                        seen.append(engine.logits)
            with tracer.invoke([*PROMPTS[0], 3]):
                alone = [].save()
                for step in tracer.iter[:]:
                    alone.append(engine.resid_post[2].cummax(0)[0])
                    if step > 1:
                        alone.append(engine.model.layers[3].mlp.down_proj.output[0].cummax(0)[0])
        return seen, alone  # pyright: ignore[reportPossiblyUnboundVariable]

    wanted, _ = alone_and_together(llama, lambda: work(llama))
    work(model)
    for _ in range(2):
        taps_of(model).shown.__self__._habits._known.clear()  # nothing is known of what the blocks do
        with counted(model) as counts:
            assert_same(work(model), wanted, "beside a step that runs again")
        assert counts == [len(PROMPTS), 1]


@pytest.mark.usefixtures("no_edits_left")
@pytest.mark.parametrize("saving", [False, True])
def test_an_edit_beside_many_requests(model: VLLM, llama: VLLM, saving: bool) -> None:
    def asked(engine: VLLM) -> Any:
        with engine.edit() as (tracer, edit):
            seen = []
            for _ in tracer.all():
                engine.resid_post[1][:] += V
                if saving:
                    seen.append(engine.resid_post[3])
            if saving:
                seen.save()  # type: ignore[attr-defined]
        try:
            enqueue(engine, PROMPTS, [5, 3, 4, 5, 2, 5])
            return [(tokens_of(each), getattr(each, "saves", {}).get("seen")) for each in completed(engine)]
        finally:
            edit.clear()

    wanted = asked(llama)
    with counted(model) as counts:
        alone, together = alone_and_together(model, lambda: asked(model))
    assert counts[0] == len(PROMPTS)
    for found in (alone, together):
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
        if saving:
            assert_same([saves for _, saves in found], [saves for _, saves in wanted], "saved")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=programs(), seed=st.integers(0, 9), stops=st.lists(st.integers(0, 400), max_size=40))
def test_any_steps_leave_what_eager_steps_leave(
    model: VLLM, llama: VLLM, program: str, seed: int, stops: list[int]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    vectors = [torch.randn(WIDTH, generator=generator) for _ in PROMPTS]
    shared = torch.randn(WIDTH, generator=generator)
    sampling = GREEDY | ({"stop_token_ids": stops} if stops else {"ignore_eos": True})
    traced = trace_of(program, ["rows", "total", "last"])
    wanted, _ = alone_and_together(llama, lambda: traced(llama, vectors, shared, sampling))
    with counted(model) as counts:
        alone, together = alone_and_together(model, lambda: traced(model, vectors, shared, sampling))
    event(f"together: {counts[0]}, ended early: {bool(stops)}, failed: {type(together).__name__}")
    if isinstance(wanted, BaseException):
        assert type(together) is type(alone) is type(wanted), program
    else:
        assert_same(alone, wanted, f"alone: {program}")
        assert_same(together, wanted, f"together: {program}")
