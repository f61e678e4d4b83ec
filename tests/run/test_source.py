"""Operations inside forwards: listed, read, edited, skipped, in any company."""

from __future__ import annotations

import inspect
import traceback

import pytest
import torch

from insitu.block import (
    LocationError,
    NotReachedError,
    OutOfOrderError,
    OutsideTraceError,
    UnknownModuleError,
    WriteError,
)
from insitu.run import Interleaver
from insitu.tree import LOGITS, Node, session_for
from tests.run import forwards
from tests.run.packed import WIDTH, Packed, rows


def packed_with(module: torch.nn.Module) -> Packed:
    """The packed model, with ``module`` for the MLP of its first layer."""
    packed = Packed()
    packed.model.layers[0].mlp = module
    packed.interleaver = Interleaver(packed.model, lambda hidden: hidden @ packed.head)
    outline = packed.interleaver.modules.outline()
    packed.nodes = Node("", lambda: outline, packed.interleaver.operations)
    return packed


@pytest.fixture(params=[0, 1], ids=["first-step", "later-step"])
def packed(request: pytest.FixtureRequest) -> Packed:
    packed = packed_with(forwards.Mixed())
    for _ in range(request.param):  # the order of the forward is known from then on
        packed.alone(rows(1), lambda: packed.nodes.layers[0].output)
    return packed


def source(packed: Packed):
    return packed.nodes.layers[0].mlp.source


# Listing.


def test_printing_shows_the_text_with_line_numbers_and_names(packed: Packed) -> None:
    lines, first = inspect.getsourcelines(forwards.Mixed.forward)
    shown = repr(source(packed)).splitlines()
    assert shown[0] == "Mixed.forward"
    assert [int(line.split()[0]) for line in shown[1:]] == list(range(first, first + len(lines)))
    beside = {line.split("# ")[0].split(maxsplit=1)[1].strip(): line.split("# ")[1] for line in shown if "# " in line}
    assert beside["large = scaled(x, factor)"] == "scaled_0"
    assert beside["total = large + x"] == "add_0"
    assert beside["total = torch.add(total, 1.0)"] == "torch_add_0"
    assert beside["total *= 2.0"] == "mul_0"
    assert beside["total = torch.cat([half.clone() for half in halves], -1)"] == "torch_cat_0, half_clone_0"
    assert beside["return self.act(total)"] == "self_act_0"
    assert [each for each in dir(source(packed)) if each.startswith("self")] == ["self_act_0"]
    assert len(list(source(packed))) == len(dir(source(packed)))


def test_printing_what_an_operation_calls(packed: Packed) -> None:
    assert "torch_mul_0" in repr(source(packed).scaled_0.source)
    assert "shifted_0" in repr(source(packed).scaled_0.source)
    assert "# add_0" in repr(source(packed).scaled_0.source.shifted_0.source)


def test_listing_works_in_a_block_too(packed: Packed) -> None:
    lister = packed.nodes
    packed.nodes = Node("", lambda: packed.interleaver.modules.outline())
    shown, names = packed.alone(rows(1), lambda: (repr(source(packed)), dir(source(packed).scaled_0.source)))
    assert shown == repr(lister.layers[0].mlp.source)
    assert names == ["shifted_0", "torch_mul_0"]


def test_an_unknown_operation_names_the_nearest(packed: Packed) -> None:
    text = r"`layers\.0\.mlp\.source` \(Mixed\.forward\) has no operation `torch_ad_0`; the nearest is `torch_add_0`"
    with pytest.raises(UnknownModuleError, match=text):
        source(packed).torch_ad_0
    with pytest.raises(
        UnknownModuleError, match=r"`layers\.0\.mlp\.source\.scaled_0\.source` \(scaled\) has no operation"
    ):
        source(packed).scaled_0.source.nothing
    with pytest.raises(UnknownModuleError, match="it has scaled_0, add_0, range_0"):
        packed.alone(rows(1), lambda: source(packed).nothing.output)


def test_without_a_listing_any_operation_can_be_named_and_the_block_says_so() -> None:
    packed = packed_with(forwards.Mixed())
    packed.nodes = Node("", lambda: None)
    operation = source(packed).torch_ad_0
    assert repr(operation) == "<operation layers.0.mlp.source.torch_ad_0>"
    with pytest.raises(UnknownModuleError, match="the nearest is `torch_add_0`"):
        packed.alone(rows(1), lambda: operation.output)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (forwards.Lazy(), r"`Lazy\.forward` is a generator"),
        (forwards.Foreign(), r"the forward of `layers\.0\.mlp` is not written in Python"),
        (
            eval("type('Made', (torch.nn.Module,), {'forward': lambda self, x: x * 2})()"),
            r"the source of .* can't be found",
        ),
    ],
    ids=["generator", "builtin", "no-source"],
)
def test_a_forward_that_can_t_stop_is_refused_by_name(module: torch.nn.Module, text: str) -> None:
    packed = packed_with(module)
    with pytest.raises(LocationError, match=text):
        source(packed).mul_0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "self_act_0",
            r"`layers\.0\.mlp\.source\.self_act_0` calls a module \(Identity\): .* `layers\.0\.mlp\.act\.source`",
        ),
        ("torch_cat_0", r"what `layers\.0\.mlp\.source\.torch_cat_0` calls is not written in Python"),
        ("total_chunk_0", r"what `layers\.0\.mlp\.source\.total_chunk_0` calls can be told only while it runs"),
        ("add_0", r"what `layers\.0\.mlp\.source\.add_0` calls is not written in Python \(add\)"),
    ],
)
def test_an_operation_without_operations_is_refused_by_name(packed: Packed, name: str, text: str) -> None:
    operation = getattr(source(packed), name)
    with pytest.raises(LocationError, match=text):
        print(operation.source)
    with pytest.raises(LocationError, match=text):
        packed.alone(rows(1), lambda: operation.source.anything.output)


# Reading.


def test_operations_are_read_in_order_beside_module_places(packed: Packed) -> None:
    def block():
        mlp = packed.nodes.layers[0].mlp
        return (
            mlp.input,
            mlp.source.scaled_0.inputs,
            mlp.source.scaled_0.output,
            mlp.source.add_0.input,
            mlp.source.add_0.output,
            mlp.source.mul_0.output,
            mlp.source.total_chunk_0.output,
            mlp.source.self_act_0.input,
            mlp.act.input,
            mlp.act.output,
            mlp.source.self_act_0.output,
            mlp.output,
            packed.nodes.layers[1].output,
        )

    x = rows(2)
    first, inputs, large, left, total, doubled, halves, *rest, (hidden, _) = packed.alone(x, block)
    assert torch.equal(first, x)
    assert torch.equal(inputs[0][0], x)
    assert inputs[0][1:] == (2.0,)
    assert torch.equal(large, x * 2 + 0.5)
    assert torch.equal(left, large)
    assert torch.equal(total, large + x)
    assert torch.equal(doubled, forwards.mixed(x))
    assert [tuple(half.shape) for half in halves] == [(2, WIDTH // 2)] * 2
    assert all(torch.equal(value, forwards.mixed(x)) for value in rest)
    assert torch.equal(hidden, (forwards.mixed(x) + x) * 3)


def test_rows_are_the_request_s_own_in_any_company(packed: Packed) -> None:
    def block():
        return source(packed).scaled_0.output, source(packed).torch_cat_0.output

    inputs = [rows(n, start) for n, start in ((3, 1.0), (1, 50.0), (5, -7.0))]
    runs = [packed.run(block), None, packed.run(block)]
    packed.step(list(zip(inputs, runs, strict=True)))
    for x, run in zip(inputs, runs, strict=True):
        if run is not None:
            assert torch.equal(run.returned[0], x * 2 + 0.5)
            assert torch.equal(run.returned[1], forwards.mixed(x))


def test_twice_in_one_block_and_again_in_the_next(packed: Packed) -> None:
    def block():
        return [source(packed).scaled_0.output, source(packed).scaled_0.output, source(packed).add_0.output]

    for _ in range(3):
        first, again, total = packed.alone(rows(1), block)
        assert first is again
        assert torch.equal(total, first + rows(1))
    assert not [path for path, module in packed.model.named_modules() if "forward" in module.__dict__]


def test_an_operation_in_a_loop_is_served_at_the_next_visit(packed: Packed) -> None:
    def block():
        added = source(packed).torch_add_0
        seen = []
        for _ in range(3):
            seen.append((added.input, added.output))
        return seen

    x = rows(1)
    for turn, (before, after) in enumerate(packed.alone(x, block)):
        assert torch.equal(before, x * 3 + 0.5 + turn)
        assert torch.equal(after, before + 1)

    def once_too_often():
        for _ in range(4):
            source(packed).torch_add_0.input
            source(packed).torch_add_0.output

    with pytest.raises(OutOfOrderError, match=r"source\.torch_add_0\.input` has gone by"):
        packed.alone(x, once_too_often)


def test_nested_operations(packed: Packed) -> None:
    def block():
        inner = source(packed).scaled_0.source
        return (
            inner.torch_mul_0.output,
            inner.shifted_0.source.add_0.output,
            inner.shifted_0.output,
            source(packed).scaled_0.output,
        )

    product, added, shifted, large = packed.alone(rows(2), block)
    assert torch.equal(product, rows(2) * 2)
    assert torch.equal(added, rows(2) * 2 + 0.5)
    assert torch.equal(shifted, added)
    assert torch.equal(large, added)


def test_steps(packed: Packed) -> None:
    def block():
        first = source(packed).add_0.output
        session_for("").move_on()
        return first, source(packed).add_0.output

    run = packed.run(block)
    packed.step([(rows(2), run)])
    packed.step([(rows(1, 9.0), run)])
    first, second = run.returned
    assert torch.equal(first, rows(2) * 3 + 0.5)
    assert torch.equal(second, rows(1, 9.0) * 3 + 0.5)


def test_super_private_names_closures_and_defaults() -> None:
    packed = packed_with(forwards.Derived())
    own, above, total = packed.alone(
        rows(1),
        lambda: (
            source(packed).super_forward_0.output,
            source(packed).self___own_0.output,
            source(packed).add_0.output,
        ),
    )
    assert torch.equal(own, forwards.mixed(rows(1)))
    assert torch.equal(above, rows(1) * 0.5)
    assert torch.equal(total, own + above)
    inner = packed.alone(rows(1), lambda: source(packed).self___own_0.source.mul_0.output)
    assert torch.equal(inner, rows(1) * 0.5)

    packed = packed_with(forwards.closing(4.0))
    assert torch.equal(packed.alone(rows(1), lambda: source(packed).mul_0.output), (rows(1) + 4) * 2)


def test_what_is_behind_decorators_and_they_still_run() -> None:
    packed = packed_with(forwards.Decorated())
    assert dir(source(packed)) == ["add_0", "doubled_0"]
    forwards.notes.clear()
    product, total, output = packed.alone(
        rows(1),
        lambda: (
            source(packed).doubled_0.source.mul_0.output,
            source(packed).add_0.output,
            packed.nodes.layers[0].mlp.output,
        ),
    )
    assert forwards.notes == ["forward", "doubled"]
    assert torch.equal(product, rows(1) * 2)
    assert torch.equal(total, rows(1) * 2 + 1)
    assert torch.equal(output, total)


def test_the_root_module_has_a_source() -> None:
    packed = packed_with(forwards.Mixed())

    def block():
        layer = packed.nodes.source.layer_0
        return layer.output, layer.input, layer.output, packed.nodes.source.add_0.output

    first, between, second, out = packed.alone(rows(1), block)
    assert torch.equal(between, first[0])
    assert torch.equal(out, second[0] + second[1])


# Editing.


def test_edits_and_replacements_reach_the_model_and_only_this_request(packed: Packed) -> None:
    def in_place():
        source(packed).scaled_0.output[-1] = 0
        return packed.nodes.layers[0].mlp.output

    def replaced():
        source(packed).scaled_0.output = torch.ones(2, WIDTH, dtype=torch.float64)
        return packed.nodes.layers[0].mlp.output

    def inputs():
        source(packed).add_0.inputs = ((torch.zeros(2, WIDTH), torch.ones(2, WIDTH)), {})
        return packed.nodes.layers[0].mlp.output

    def first_input():
        source(packed).torch_add_0.input = torch.zeros(2, WIDTH)
        return packed.nodes.layers[0].mlp.output

    def nested():
        source(packed).scaled_0.source.shifted_0.source.add_0.output = torch.zeros(2, WIDTH)
        return packed.nodes.layers[0].mlp.output

    def plain():
        return packed.nodes.layers[0].mlp.output

    x = rows(2)
    runs = [packed.run(block) for block in (in_place, replaced, inputs, first_input, nested, plain)]
    packed.step([(x.clone(), run) for run in runs])
    for run in runs:
        assert run.error is None
    edited, ones, given, loop, inner, left = [run.returned for run in runs]
    assert torch.equal(edited[0], forwards.mixed(x)[0])
    assert torch.equal(edited[1], (x[1] + 3) * 2)
    assert torch.equal(ones, (1 + x + 3) * 2)
    assert torch.equal(given, torch.full((2, WIDTH), 8.0))
    assert torch.equal(loop, torch.full((2, WIDTH), 6.0))
    assert torch.equal(inner, (x + 3) * 2)
    assert torch.equal(left, forwards.mixed(x))


def test_rows_that_share_memory_are_edited_apart() -> None:
    packed = packed_with(forwards.Spread())

    def block():
        source(packed).x_expand_0.output[0, 1] = 100.0
        return packed.nodes.layers[0].mlp.output

    run, other = packed.run(block), packed.run(lambda: packed.nodes.layers[0].mlp.output)
    packed.step([(rows(1), run), (rows(1), other)])
    assert run.error is None
    wanted = rows(1)[:, :1] + rows(1) + 1
    assert torch.equal(other.returned, wanted)
    assert run.returned[0].tolist() == [wanted[0, 0], 100.0 + rows(1)[0, 1] + 1, *wanted[0, 2:]]


def test_skipping_an_operation(packed: Packed) -> None:
    def block():
        source(packed).scaled_0.skip(torch.zeros(2, WIDTH))
        return source(packed).scaled_0.output, packed.nodes.layers[0].mlp.output

    runs = [packed.run(block), packed.run(lambda: packed.nodes.layers[0].mlp.output)]
    packed.step([(rows(2), run) for run in runs])
    own, output = runs[0].returned
    assert torch.equal(own, torch.zeros(2, WIDTH))
    assert torch.equal(output, (rows(2) + 3) * 2)
    assert torch.equal(runs[1].returned, forwards.mixed(rows(2)))


def test_a_skipped_operation_has_not_changed_its_inputs() -> None:
    packed = packed_with(forwards.Spread())

    def block():
        source(packed).x_add__0.skip(torch.zeros(1, WIDTH))
        return source(packed).add_0.inputs[0][1]

    runs = [packed.run(block), packed.run(lambda: source(packed).add_0.inputs[0][1])]
    packed.step([(rows(1), run) for run in runs])
    assert torch.equal(runs[0].returned, rows(1))
    assert torch.equal(runs[1].returned, rows(1) + 1)


def test_an_operation_inside_a_skipped_one_is_refused_by_name(packed: Packed) -> None:
    def block():
        source(packed).scaled_0.skip(torch.zeros(1, WIDTH))
        source(packed).scaled_0.source.torch_mul_0.output

    with pytest.raises(
        OutOfOrderError, match=r"it is inside `layers\.0\.mlp\.source\.scaled_0`, which is skipped for this request"
    ):
        packed.alone(rows(1), block)

    def module():
        packed.nodes.layers[0].mlp.skip(torch.zeros(1, WIDTH))
        source(packed).scaled_0.output

    with pytest.raises(OutOfOrderError, match=r"it is inside `layers\.0\.mlp`, which is skipped for this request"):
        packed.alone(rows(1), module)


@pytest.mark.parametrize("name", ["scaled_0", "range_0", "total_chunk_0"])
def test_a_write_that_does_not_fit_says_what_was_wanted(packed: Packed, name: str) -> None:
    def block():
        getattr(source(packed), name).output = torch.zeros(3, WIDTH)

    with pytest.raises(WriteError, match=rf"layers\.0\.mlp\.source\.{name}\.output .*(takes|is not a tensor|range)"):
        packed.alone(rows(2), block)


def test_what_can_be_assigned(packed: Packed) -> None:
    with pytest.raises(AttributeError, match=r"source\.add_0` can't be assigned.*source\.add_0\.output = value"):
        source(packed).add_0 = 1
    with pytest.raises(AttributeError, match="has no place `outputs` to write to"):
        source(packed).add_0.outputs = 1
    with pytest.raises(OutsideTraceError, match=r"`layers\.0\.mlp\.source\.add_0\.output` exists only while"):
        source(packed).add_0.output


# Order.


def test_an_operation_that_has_gone_by_is_an_error_at_the_read(packed: Packed) -> None:
    def block():
        source(packed).add_0.output
        try:
            source(packed).scaled_0.output
        except OutOfOrderError as error:
            return str(error), source(packed).mul_0.output

    text, later = packed.alone(rows(1), block)
    assert "`layers.0.mlp.source.scaled_0.output` has gone by" in text
    assert "The block is at `layers.0.mlp.source.add_0.output`" in text
    assert torch.equal(later, forwards.mixed(rows(1)))


@pytest.mark.parametrize("after", ["layers[0].mlp.output", "layers[1].mlp.input", "logits"])
def test_an_operation_of_a_module_that_has_ended(packed: Packed, after: str) -> None:
    def block():
        session_for("").read(LOGITS) if after == "logits" else eval(f"nodes.{after}", {"nodes": packed.nodes})
        source(packed).scaled_0.output

    with pytest.raises(OutOfOrderError, match=r"source\.scaled_0\.output` has gone by"):
        packed.alone(rows(1), block)


def test_a_module_inside_that_has_gone_by_after_its_operation(packed: Packed) -> None:
    def block():
        source(packed).self_act_0.output
        packed.nodes.layers[0].mlp.act.output

    with pytest.raises(OutOfOrderError, match=r"`layers\.0\.mlp\.act\.output` has gone by"):
        packed.alone(rows(1), block)


def test_an_operation_that_the_forward_does_not_come_to(packed: Packed) -> None:
    def block():
        try:
            source(packed).total_neg_0.output
        except NotReachedError as error:
            return str(error), session_for("").read(LOGITS).shape

    text, shape = packed.alone(rows(1), block)
    assert "`layers.0.mlp.source.total_neg_0.output` was not reached" in text
    assert "did not come to it in `layers.0.mlp` (Mixed)" in text
    assert shape[0] == 1


@pytest.mark.parametrize("steps_before", [0, 1])
def test_an_operation_around_a_module_that_the_block_is_in(steps_before: int) -> None:
    packed = packed_with(forwards.Outer(forwards.Mixed()))
    for _ in range(steps_before):
        packed.alone(rows(1), lambda: packed.nodes.layers[0].output)

    def block():
        inner = packed.nodes.layers[0].mlp.inner.act.output
        return inner, packed.nodes.layers[0].mlp.source.y_clone_0.output

    inner, outer = packed.alone(rows(1), block)
    assert torch.equal(inner, outer)

    def by_helper():
        return helper(packed.nodes)

    inner, outer = packed.alone(rows(1), by_helper)
    assert torch.equal(inner, outer)

    def hidden():
        packed.nodes.layers[0].mlp.inner.act.output
        getattr(packed.nodes.layers[0].mlp, "sou" + "rce").y_clone_0.output

    with pytest.raises(LocationError, match=r"`layers\.0\.mlp` is under way.*name `\.source` in the block's own text"):
        packed.alone(rows(1), hidden)


def helper(nodes: Node):
    return nodes.layers[0].mlp.inner.act.output, nodes.layers[0].mlp.source.y_clone_0.output


def test_an_error_inside_an_operation_shows_the_forward_s_own_line(packed: Packed) -> None:
    packed.model.layers[0].mlp.act = None
    run = packed.run(lambda: source(packed).add_0.output)
    with pytest.raises(TypeError) as caught:
        packed.step([(rows(1), run)])
    lines, first = inspect.getsourcelines(forwards.Mixed.forward)
    last = next(
        entry
        for entry in traceback.extract_tb(caught.value.__traceback__)
        if entry.name == "forward" and entry.filename == forwards.__file__
    )
    assert last.lineno == first + len(lines) - 1
    assert last.line == "return self.act(total)"


def test_an_edited_file_is_refused(tmp_path) -> None:
    file = tmp_path / "edited.py"
    text = "import torch\nclass Late(torch.nn.Module):\n    def forward(self, x):\n        return torch.mul(x, 2.0)\n"
    file.write_text(text)
    space: dict = {}
    exec(compile(text, str(file), "exec"), space)
    file.write_text(text.replace("mul", "add"))
    packed = packed_with(space["Late"]())
    with pytest.raises(LocationError, match=r"`Late\.forward` is not what is running: .* was edited after"):
        source(packed).torch_add_0
