"""Blocks beside a plain torch module: who sees what, when, and what an edit reaches."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from insitu.block import LocationError, NotReachedError, OutOfOrderError, SharedModuleError, WriteError
from insitu.tree import LOGITS, RESULT, SAMPLES, session_for
from tests.run.packed import VOCAB, WIDTH, Packed, Scale, rows


@pytest.fixture
def packed() -> Packed:
    return Packed()


def read(place):
    return session_for(str(place)).read(place)


def expected(hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """The model's arithmetic written out."""
    mlp0 = hidden * 2
    residual1 = hidden + mlp0
    mlp1 = residual1 * 3
    return {"mlp0": mlp0, "residual1": residual1, "mlp1": mlp1, "out": mlp1 + residual1}


def test_values_are_the_request_s_own_rows_in_any_company(packed: Packed) -> None:
    def block():
        first = packed.nodes.layers[0].output
        second = packed.nodes.layers[1].output
        return first, second, read(LOGITS), read(SAMPLES)

    inputs = [rows(n, start) for n, start in ((3, 1.0), (1, 50.0), (5, -7.0))]
    runs = [packed.run(block), None, packed.run(block)]
    packed.step(list(zip(inputs, runs, strict=True)))
    for hidden, run in zip(inputs, runs, strict=True):
        if run is None:
            continue
        (mlp0, residual0), (mlp1, residual1), logits, samples = run.returned
        want = expected(hidden)
        assert torch.equal(mlp0, want["mlp0"])
        assert torch.equal(residual0, hidden)
        assert torch.equal(mlp1, want["mlp1"])
        assert torch.equal(residual1, want["residual1"])
        assert logits.shape == (1, VOCAB)
        assert torch.equal(logits, want["out"][-1:] @ packed.head)
        assert samples.tolist() == logits.argmax(-1).tolist()


def test_a_held_value_is_not_overwritten_by_a_later_layer(packed: Packed) -> None:
    def block():
        residual = packed.nodes.layers[0].output[1]
        view = residual[-1]
        packed.nodes.layers[1].output  # adds to the residual in place
        return residual, view

    hidden = rows(2)
    residual, view = packed.alone(hidden, block)
    assert torch.equal(residual, hidden)
    assert torch.equal(view, hidden[-1])
    assert not residual.is_inference()


def test_in_place_edits_and_replacements_reach_the_model_and_only_this_request(packed: Packed) -> None:
    def in_place():
        packed.nodes.layers[0].mlp.output[-1] = 0
        return packed.nodes.layers[1].output

    def replaced():
        packed.nodes.layers[0].mlp.output = torch.ones(2, WIDTH, dtype=torch.float64)
        return packed.nodes.layers[1].output

    hidden = rows(2)
    runs = [packed.run(in_place), packed.run(replaced), packed.run(lambda: packed.nodes.layers[1].output)]
    packed.step([(hidden.clone(), run) for run in runs])
    zeroed, ones, plain = [run.returned[1] for run in runs]
    assert torch.equal(zeroed[0], hidden[0] * 3)
    assert torch.equal(zeroed[1], hidden[1])
    assert torch.equal(ones, hidden + 1)
    assert torch.equal(plain, hidden * 3)


def test_replacing_an_output_that_is_the_input_leaves_the_input_alone(packed: Packed) -> None:
    seen = []

    def block():
        packed.nodes.layers[0].act.output = torch.zeros(2, WIDTH)
        seen.append(packed.nodes.layers[0].output[0])

    mlp_out = []
    handle = packed.model.layers[0].act.register_forward_hook(lambda m, args, out: mlp_out.append(args[0].clone()))
    packed.alone(rows(2), block)
    handle.remove()
    assert torch.equal(mlp_out[0], rows(2) * 2)
    assert torch.equal(seen[0], torch.zeros(2, WIDTH))


def test_a_late_write_changes_nothing(packed: Packed) -> None:
    def block():
        early = packed.nodes.layers[0].output[0]
        packed.nodes.layers[1].mlp.input
        early.zero_()
        return packed.nodes.layers[1].output[1]

    assert torch.equal(packed.alone(rows(2), block), rows(2) * 3)


def test_inputs_and_their_replacement(packed: Packed) -> None:
    def block():
        args, kwargs = packed.nodes.layers[1].mlp.inputs
        packed.nodes.layers[1].mlp.input = args[0] + 1
        return args, kwargs, packed.nodes.layers[1].mlp.output

    args, kwargs, output = packed.alone(rows(1), block)
    assert kwargs == {}
    assert torch.equal(args[0], rows(1) * 3)
    assert torch.equal(output, (rows(1) * 3 + 1) * 3)


def test_the_enclosing_module_s_output_can_follow(packed: Packed) -> None:
    def block():
        inner = packed.nodes.layers[1].mlp.output
        return inner, packed.nodes.layers[1].output[0], packed.nodes.layers[1].output[0]

    for _ in range(2):  # the first step learns the order, the second uses it
        inner, outer, again = packed.alone(rows(1), block)
        assert torch.equal(inner, outer)
        assert again is outer


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_place_that_has_gone_by_is_an_error_at_the_read(packed: Packed, steps_before: int) -> None:
    for _ in range(steps_before):
        packed.alone(rows(1), lambda: packed.nodes.layers[1].output)

    def block():
        packed.nodes.layers[1].output
        try:
            packed.nodes.layers[0].output
        except OutOfOrderError as error:
            return str(error)

    text = packed.alone(rows(1), block)
    assert "`layers.0.output` has gone by" in text
    assert "The block is at `layers.1.output`" in text


@pytest.mark.parametrize(
    ("then", "late"), [(LOGITS, "model.logits"), (SAMPLES, "model.samples"), (RESULT, "tracer.result")]
)
def test_modules_come_before_the_tail_of_a_step(packed: Packed, then, late: str) -> None:
    def block():
        read(then)
        packed.nodes.layers[0].output

    with pytest.raises(OutOfOrderError, match=r"layers\.0\.output") as caught:
        packed.alone(rows(1), block)
    assert late in str(caught.value)


def test_a_module_that_is_never_called_is_named_when_the_forward_is_over(packed: Packed) -> None:
    def block():
        try:
            packed.nodes.never.output
        except NotReachedError as error:
            return str(error), read(LOGITS)

    text, logits = packed.alone(rows(1), block)
    assert "`never.output` was not reached" in text
    assert logits.shape == (1, VOCAB)


def test_a_shared_module_is_served_under_the_path_asked_for(packed: Packed) -> None:
    packed.alone(rows(1), lambda: packed.nodes.layers[0].output)
    assert packed.interleaver.modules.is_shared("layers.0.act")
    first = packed.alone(rows(1), lambda: packed.nodes.layers[0].act.output)
    second = packed.alone(rows(1), lambda: packed.nodes.layers[1].act.output)
    assert torch.equal(first, rows(1) * 2)
    assert torch.equal(second, rows(1) * 9)


def test_a_shared_module_whose_visits_can_t_be_told_apart_says_so(packed: Packed) -> None:
    packed.model.layers[1].other = packed.model.layers[1].act
    packed.interleaver = type(packed.interleaver)(packed.model, lambda hidden: hidden @ packed.head)
    with pytest.raises(SharedModuleError, match=r"layers\.1\.act.*3 paths.*can.t be told apart"):
        packed.alone(rows(1), lambda: packed.nodes.layers[1].act.output)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(3, WIDTH), r"takes shape \(2, 4\) torch.float32; got shape \(3, 4\)"),
        (torch.zeros(2, WIDTH, dtype=torch.int64), r"takes a floating tensor"),
        (0, r"got int 0"),
        ((torch.zeros(2, WIDTH),), r"got tuple of 1"),
    ],
)
def test_a_write_that_does_not_fit_says_what_was_wanted(packed: Packed, value, text: str) -> None:
    def block():
        packed.nodes.layers[0].mlp.output = value

    with pytest.raises(WriteError, match=text) as caught:
        packed.alone(rows(2), block)
    assert "layers.0.mlp.output" in str(caught.value)


def test_an_error_ends_its_own_run_and_no_other(packed: Packed) -> None:
    def bad():
        packed.nodes.layers[0].output
        raise SystemExit("no")

    def good():
        return packed.nodes.layers[1].output[1]

    runs = [packed.run(bad), packed.run(good)]
    packed.step([(rows(1), runs[0]), (rows(2), runs[1])])
    assert isinstance(runs[0].error, SystemExit)
    assert runs[0].done
    assert torch.equal(runs[1].returned, rows(2) * 3)


def test_torch_state_of_a_block_stays_in_the_block(packed: Packed) -> None:
    def block():
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad(), torch.device("meta"):
            value = packed.nodes.layers[0].output[0]
            inside = (torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.zeros(1).device.type)
        return value, inside, torch.is_grad_enabled()

    seen = []
    hook = packed.model.layers[0].mlp.register_forward_hook(
        lambda *_: seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), torch.zeros(1).device.type))
    )
    value, inside, after = packed.alone(rows(1), block)
    hook.remove()
    assert seen == [(False, False, "cpu")]
    assert inside == (True, True, "meta")
    assert after is False
    assert value.device.type == "cpu"
    assert not torch.is_autocast_enabled("cpu")


def test_nothing_is_left_on_the_model(packed: Packed) -> None:
    packed.alone(rows(1), lambda: packed.nodes.layers[0].output)
    assert not [path for path, module in packed.model.named_modules() if "forward" in module.__dict__]

    def block():
        return packed.nodes.layers[0].output

    run = packed.run(block)
    packed.step([(rows(1), run)])
    gone = weakref.ref(run)
    packed.interleaver.rows = {}
    del run
    gc.collect()
    assert gone() is None


def test_a_killed_run_runs_its_finally(packed: Packed) -> None:
    seen = []

    def block():
        try:
            read(RESULT)
        finally:
            seen.append("finally")

    run = packed.run(block)
    packed.step([(rows(1), run)])
    assert run.waiting == RESULT
    run.kill()
    assert seen == ["finally"]
    assert run.done
    assert run.error is None


def test_calling_a_module_computes_and_fires_nothing(packed: Packed) -> None:
    def block():
        value = packed.nodes.layers[0].mlp(torch.ones(1, WIDTH))
        value += 1
        return value, packed.nodes.layers[0].mlp.output, session_for("").unembed(torch.ones(1, WIDTH))

    called, served, logits = packed.alone(rows(1), block)
    assert torch.equal(called, torch.full((1, WIDTH), 3.0))
    assert torch.equal(served, rows(1) * 2)
    assert torch.allclose(logits, torch.ones(1, WIDTH) @ packed.head)


def test_replacements_and_in_place_edits_of_several_requests_at_one_place(packed: Packed) -> None:
    def replaced():
        packed.nodes.layers[0].act.output = torch.zeros(1, WIDTH)
        return packed.nodes.layers[0].output[0]

    def in_place():
        packed.nodes.layers[0].act.output[:] = 7
        return packed.nodes.layers[0].output[0]

    seen = []
    handle = packed.model.layers[0].act.register_forward_hook(lambda m, args, out: seen.append(args[0]))
    runs = [packed.run(block) for block in (replaced, in_place, replaced)]
    packed.step([(rows(1), run) for run in runs])
    handle.remove()
    assert [run.returned[0, 0].item() for run in runs] == [0, 7, 0]
    # The activation returns its input: a replacement leaves that alone, an in-place edit does not.
    assert torch.equal(seen[0], torch.cat([rows(1) * 2, torch.full((1, WIDTH), 7.0), rows(1) * 2]))


def test_replacing_an_input_leaves_other_users_of_the_tensor_alone(packed: Packed) -> None:
    def block():
        packed.nodes.layers[1].mlp.input = torch.zeros(1, WIDTH)
        return packed.nodes.layers[1].output

    hidden, residual = packed.alone(rows(1), block)
    assert torch.equal(hidden, torch.zeros(1, WIDTH))
    assert torch.equal(residual, rows(1) * 3)


@pytest.mark.parametrize("token", [VOCAB, -1])
def test_samples_are_written_and_checked(packed: Packed, token: int) -> None:
    def block():
        session_for("").read(SAMPLES)[:] = 3

    ids = packed.step([(rows(1), packed.run(block)), (rows(1), None)])
    assert ids[0].item() == 3
    assert ids[1].item() != 3

    def bad():
        session_for("").write(SAMPLES, torch.tensor([token]))
        read(RESULT)

    text = f"model.samples takes token ids, 0 to {VOCAB - 1}; got {token}"
    with pytest.raises(WriteError, match=text):
        packed.alone(rows(1), bad)


def test_a_module_with_a_cache_can_t_be_called(packed: Packed) -> None:
    packed.model.layers[0].mlp.kv_cache = torch.zeros(1)

    def block():
        return packed.nodes.layers[0](torch.zeros(1, WIDTH), None)

    with pytest.raises(LocationError, match=r"`layers\.0` \(Layer\) can't be called.*KV cache"):
        packed.alone(rows(1), block)


def test_a_buffer_is_passed_whole_and_can_t_be_edited(packed: Packed) -> None:
    class Lookup(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(3, WIDTH))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2.0, self.table

    class Looking(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lookup = Lookup()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lookup(x)[0]

    packed.model.layers[0].mlp = Looking()
    packed.interleaver = type(packed.interleaver)(packed.model, lambda hidden: hidden @ packed.head)
    outline = packed.interleaver.modules.outline()
    packed.nodes = type(packed.nodes)("", lambda: outline)
    runs = [packed.run(lambda: packed.nodes.layers[0].mlp.lookup.output) for _ in range(3)]
    packed.step([(rows(1), run) for run in runs])
    assert all(run.returned[1].shape == (3, WIDTH) for run in runs)

    def edit():
        packed.nodes.layers[0].mlp.lookup.output[1][:] = 0
        read(RESULT)

    with pytest.raises(WriteError, match="does not go by tokens"):
        packed.alone(rows(3), edit)
    assert packed.model.layers[0].mlp.lookup.table.eq(1).all()


class Twice(torch.nn.Module):
    """Calls one module twice, and another in between."""

    def __init__(self) -> None:
        super().__init__()
        self.again = Scale(2.0)
        self.between = Scale(3.0)
        self.after = Scale(5.0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.after(self.again(self.between(self.again(hidden))))


def test_a_module_called_twice_is_served_at_its_next_visit() -> None:
    packed = Packed(Twice())
    hidden = rows(2)

    def block():
        first = packed.nodes.again.output
        same = packed.nodes.again.output
        between = packed.nodes.between.output
        second = packed.nodes.again.output
        return first, same, between, second, packed.nodes.after.input

    packed.alone(hidden, lambda: packed.nodes.after.output)  # the first step, in which the order is learnt
    for _ in range(2):
        first, same, between, second, after = packed.alone(hidden, block)
        assert first is same
        for found, factor in ((first, 2), (between, 6), (second, 12), (after, 12)):
            assert torch.equal(found, hidden * factor)


def test_an_edit_at_the_second_visit_is_of_that_visit() -> None:
    packed = Packed(Twice())

    def block():
        packed.nodes.between.output
        packed.nodes.again.output = torch.ones(2, WIDTH)
        return packed.nodes.after.output

    packed.alone(rows(2), lambda: packed.nodes.after.output)
    assert torch.equal(packed.alone(rows(2), block), torch.full((2, WIDTH), 5.0))


@pytest.mark.parametrize("learnt", [False, True])
def test_a_module_called_twice_has_gone_by_after_its_last_visit(learnt: bool) -> None:
    packed = Packed(Twice())
    if learnt:
        packed.alone(rows(2), lambda: packed.nodes.after.output)

    def block():
        packed.nodes.after.output
        packed.nodes.again.output

    with pytest.raises(OutOfOrderError) as caught:
        packed.alone(rows(2), block)
    assert str(caught.value) == (
        "`again.output` has gone by in this step. The block is at `after.output`, which comes after it. Places are "
        "read in the order of the forward: move this read up, to where the model gets there"
    )
