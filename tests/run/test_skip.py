"""Skipped modules: their output is the block's value, for its request alone, and they leave nothing behind."""

from __future__ import annotations

import pytest
import torch

from insitu.block import OutOfOrderError, OutsideTraceError, WriteError
from insitu.tree import LOGITS, session_for
from tests.run.packed import WIDTH, Packed, rows


@pytest.fixture
def packed() -> Packed:
    return Packed()


def full(count: int, value: float) -> torch.Tensor:
    return torch.full((count, WIDTH), value)


def test_the_value_is_the_output_and_the_model_goes_on_with_it(packed: Packed) -> None:
    def block():
        mlp = packed.nodes.layers[0].mlp
        mlp.skip(full(2, 5.0))
        return mlp.output, packed.nodes.layers[0].output, packed.nodes.layers[1].mlp.input

    own, (hidden, residual), after = packed.alone(rows(2), block)
    assert torch.equal(own, full(2, 5.0))
    assert torch.equal(hidden, full(2, 5.0))
    assert torch.equal(residual, rows(2))
    assert torch.equal(after, rows(2) + 5)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_requests_that_skip_one_module_with_values_of_their_own_and_others_that_do_not(
    packed: Packed, steps_before: int
) -> None:
    for _ in range(steps_before):
        packed.alone(rows(1), lambda: packed.nodes.layers[0].output)

    def skipping(value: float, count: int):
        def block():
            packed.nodes.layers[0].mlp.skip(full(count, value))
            return packed.nodes.layers[1].output

        return block

    def reading():
        return packed.nodes.layers[0].mlp.output, packed.nodes.layers[1].output

    runs = [packed.run(skipping(5.0, 2)), packed.run(reading), packed.run(skipping(-1.0, 3)), None]
    packed.step(list(zip([rows(2), rows(4, 9.0), rows(3), rows(1)], runs, strict=True)))
    for run, count, value in ((runs[0], 2, 5.0), (runs[2], 3, -1.0)):
        hidden, residual = run.returned
        assert torch.equal(residual, rows(count) + value)
        assert torch.equal(hidden, residual * 3)
    own, (hidden, residual) = runs[1].returned
    assert torch.equal(own, rows(4, 9.0) * 2)
    assert torch.equal(residual, rows(4, 9.0) * 3)


def test_what_a_skipped_module_changed_in_its_inputs_is_undone_for_this_request_alone(packed: Packed) -> None:
    def skipping():
        hidden, residual = packed.nodes.layers[1].inputs[0]
        packed.nodes.layers[1].skip((hidden + 100, residual))
        return hidden, residual

    def reading():
        return packed.nodes.layers[1].output

    seen = []
    handle = packed.model.layers[1].register_forward_hook(lambda m, args, out: seen.append((args, out)))
    runs = [packed.run(skipping), packed.run(reading)]
    packed.step([(rows(2), run) for run in runs])
    handle.remove()
    # The layer adds to the residual that it is given, in place.
    (args, (hidden, residual)) = seen[0]
    assert torch.equal(args[1], torch.cat([rows(2), rows(2) * 3]))
    assert torch.equal(residual, torch.cat([rows(2), rows(2) * 3]))
    assert torch.equal(hidden, torch.cat([rows(2) * 2 + 100, rows(2) * 9]))
    assert torch.equal(runs[0].returned[1], rows(2))
    assert torch.equal(runs[1].returned[0], rows(2) * 9)


def test_an_edited_input_stays_edited_when_the_module_is_skipped(packed: Packed) -> None:
    def block():
        packed.nodes.layers[1].inputs[0][1][:] = 7.0
        packed.nodes.layers[1].skip((full(1, 1.0), full(1, 2.0)))
        return packed.nodes.layers[1].output

    seen = []
    handle = packed.model.layers[1].register_forward_hook(lambda m, args, out: seen.append(args[1].clone()))
    hidden, residual = packed.alone(rows(1), block)
    handle.remove()
    assert torch.equal(seen[0], full(1, 7.0))
    assert torch.equal(hidden, full(1, 1.0))
    assert torch.equal(residual, full(1, 2.0))


def test_the_output_of_a_skipped_module_can_still_be_edited(packed: Packed) -> None:
    def block():
        packed.nodes.layers[0].mlp.skip(full(2, 5.0))
        packed.nodes.layers[0].mlp.output[0] = 0
        return packed.nodes.layers[0].output[0]

    assert torch.equal(packed.alone(rows(2), block), torch.cat([full(1, 0.0), full(1, 5.0)]))


def test_a_shared_module_is_skipped_under_the_path_asked_for(packed: Packed) -> None:
    def block():
        packed.nodes.layers[1].act.skip(full(1, 0.0))
        return packed.nodes.layers[1].output

    hidden, residual = packed.alone(rows(1), block)
    assert torch.equal(hidden, full(1, 0.0))
    assert torch.equal(residual, rows(1) * 3)


def test_the_last_thing_that_a_block_does(packed: Packed) -> None:
    logits = []

    def reading():
        return session_for("").read(LOGITS)

    for block in (lambda: packed.nodes.layers[1].skip((full(1, 0.0), full(1, 1.0))), reading):
        run = packed.run(block)
        logits.append(packed.step([(rows(1), run)]))
        assert run.error is None
    assert logits[0].item() == (full(1, 1.0) @ packed.head).argmax().item()


@pytest.mark.parametrize("inside", ["mlp", "act"])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_place_inside_a_skipped_module_is_refused_by_name(packed: Packed, inside: str, steps_before: int) -> None:
    for _ in range(steps_before):
        packed.alone(rows(1), lambda: packed.nodes.layers[0].output)

    def block():
        packed.nodes.layers[0].skip((full(1, 1.0), full(1, 2.0)))
        packed.nodes.layers[0].get(inside).output

    with pytest.raises(
        OutOfOrderError,
        match=rf"`layers\.0\.{inside}\.output` can't be read: it is inside `layers\.0`, "
        r"which is skipped for this request",
    ):
        packed.alone(rows(1), block)


def test_a_module_that_has_begun_can_t_be_skipped(packed: Packed) -> None:
    packed.alone(rows(1), lambda: packed.nodes.layers[0].output)

    def block():
        packed.nodes.layers[0].mlp.output
        packed.nodes.layers[0].skip((full(1, 1.0), full(1, 2.0)))

    with pytest.raises(OutOfOrderError, match=r"`layers\.0\.input` has gone by"):
        packed.alone(rows(1), block)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(3, WIDTH), r"layers\.0\.mlp\.output takes shape \(2, 4\) torch.float32; got shape \(3, 4\)"),
        (torch.zeros(2, WIDTH, dtype=torch.int64), r"layers\.0\.mlp\.output takes a floating tensor"),
        (0, r"layers\.0\.mlp\.output takes shape \(2, 4\) torch.float32; got int 0"),
        ((torch.zeros(2, WIDTH),), r"layers\.0\.mlp\.output takes shape .*got tuple of 1"),
    ],
)
def test_a_value_that_does_not_fit_says_what_was_wanted(packed: Packed, value, text: str) -> None:
    seen = []

    def block():
        try:
            packed.nodes.layers[0].mlp.skip(value)
        except WriteError as error:
            seen.append(str(error))
            raise

    with pytest.raises(WriteError, match=text):
        packed.alone(rows(2), block)
    assert seen, "the error is raised where the block skips"


def test_a_skip_is_of_one_step(packed: Packed) -> None:
    def block():
        packed.nodes.layers[0].skip((full(1, 1.0), full(1, 2.0)))
        first = packed.nodes.layers[0].output[1]
        session_for("").move_on()
        return first, packed.nodes.layers[0].mlp.output, packed.nodes.layers[0].output[1]

    run = packed.run(block)
    packed.step([(rows(1), run)])
    packed.step([(rows(1), run)])
    first, inside, second = run.returned
    assert torch.equal(first, full(1, 2.0))
    assert torch.equal(inside, rows(1) * 2)
    assert torch.equal(second, rows(1))


def test_outside_a_block(packed: Packed) -> None:
    with pytest.raises(OutsideTraceError, match=r"`layers\.0\.mlp\.skip` exists only while the model runs"):
        packed.nodes.layers[0].mlp.skip(full(1, 0.0))
