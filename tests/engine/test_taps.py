"""Places served from inside the compiled model: what a block sees and does is what eager steps give.

On the CPU there are no graphs. A tap that records, as it does in one, is tried by telling it that it is in one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import insitu
from insitu.block import ArgumentError, InsituError, LocationError, SharedModuleError, UnknownModuleError
from tests.engine.helpers import own_engine, plain
from tests.engine.taps import PROMPTS, SETTINGS, Block, assert_same, name_of, recorded, taps_of

pytestmark = [pytest.mark.slow, pytest.mark.in_process]


@pytest.fixture(params=["between pieces", "recorded"])
def model(request: pytest.FixtureRequest, tapped: Any) -> Iterator[Any]:
    with recorded(tapped) if request.param == "recorded" else nullcontext():
        yield tapped


def read_streams(model: Any, tracer: Any) -> Any:
    return [[model.embed, *model.resid_post, model.logits] for _ in tracer.iter[:]]


def read_modules(model: Any, tracer: Any) -> Any:
    layers, seen = model.model.layers, []
    for _ in tracer.iter[:]:
        seen += [layers[1].mlp.output, *layers[2].inputs[0], layers[2].post_attention_layernorm.inputs]
        seen += [layers[3].self_attn.output, model.model.norm.output]
    return seen


def read_some_steps(model: Any, tracer: Any) -> Any:
    return [model.resid_post[2][-1] for _ in tracer.iter[[0, 2, 3]]]


def record(model: Any, tracer: Any) -> Any:
    cache = tracer.cache(["model.layers.*", "model.norm"], device="cpu")
    return [model.logits for _ in tracer.iter[:]], cache


def add_in_place(model: Any, tracer: Any) -> Any:
    seen = []
    for _ in tracer.iter[:]:
        stream = model.resid_post[1]
        stream += torch.linspace(-3, 3, stream.shape[-1]).to(stream)
        seen += [model.resid_post[3], model.logits]
    return seen


def add_to_a_part(model: Any, tracer: Any) -> Any:
    seen = []
    for _ in tracer.iter[:]:
        hidden = model.model.layers[1].output[0]
        hidden[:] += torch.linspace(-3, 3, hidden.shape[-1]).to(hidden)
        seen += [model.resid_post[3], model.logits]
    return seen


def scale_and_set(model: Any, tracer: Any) -> Any:
    seen = []
    for step in tracer.iter[:]:
        stream = model.resid_post[0]
        stream *= 0.5
        stream -= torch.ones(stream.shape[-1]).to(stream) * 2
        model.model.layers[1].mlp.output[:] = step
        model.resid_post[2] = torch.arange(stream.shape[-1]).to(stream).expand(stream.shape[0], -1)
        seen += [model.resid_post[3], model.logits]
    return seen


def edit_and_keep(model: Any, tracer: Any) -> Any:
    seen = []
    for _ in tracer.iter[:]:
        stream = model.resid_post[1]
        stream += 1.5
        model.model.layers[2].output[1][-1] *= 3
        model.logits
        seen += [stream, stream * 2, model.logits]
    return seen


def edit_then_look(model: Any, tracer: Any) -> Any:
    seen = []
    for step in tracer.iter[:]:
        stream = model.resid_post[1]
        stream += 1.5
        if step > 2:
            seen.append(stream.norm())
            stream /= 2
        seen += [model.resid_post[2], model.logits]
    return seen


def edit_parts_and_their_sum(model: Any, tracer: Any) -> Any:
    seen = []
    for _ in tracer.iter[:]:
        model.model.layers[1].output[0][:] += 1
        model.model.layers[1].output[1][:] *= 2
        model.resid_post[1][:, 3:9] = 0
        seen.append(model.logits)
    return seen


def edit_twice(model: Any, tracer: Any) -> Any:
    seen = []
    for _ in tracer.iter[:]:
        model.resid_post[0] *= 0.5
        kept = model.resid_post[1].clone()
        model.resid_post[2][:] = kept * 2 + 1
        seen += [kept, model.resid_post[3], model.logits]
    return seen


def replace_output(model: Any, tracer: Any) -> Any:
    seen = []
    for _ in tracer.iter[:]:
        hidden, residual = model.model.layers[2].output
        model.model.layers[2].output = (hidden * 2, residual + 1)
        seen += [model.resid_post[2], model.resid_post[3], model.logits]
    return seen


def replace_what_others_hold(model: Any, tracer: Any) -> Any:
    layers, seen = model.model.layers, []
    for _ in tracer.iter[:]:
        layers[1].mlp.output = layers[1].mlp.output * 3
        (first, second), _ = layers[2].post_attention_layernorm.inputs
        layers[2].post_attention_layernorm.inputs = (first * 0, second), {}
        seen += [model.resid_post[3], model.logits]
    return seen


def leave_the_taps(model: Any, tracer: Any) -> Any:
    layers, seen = model.model.layers, []
    for _ in tracer.iter[:]:
        model.resid_post[0] += 1
        seen += [layers[1].input_layernorm.output, model.resid_post[1].clone()]
        model.resid_post[2] *= 2
        seen += [layers[3].mlp.down_proj.output, model.logits]
    return seen


def edit_at_one_step(model: Any, tracer: Any) -> Any:
    seen = []
    for step in tracer.iter[:]:
        if step == 3:
            model.resid_post[1][:] = 1
        seen += [model.resid_post[2], model.logits]
    return seen


def call_a_module(model: Any, tracer: Any) -> Any:
    return [model.unembed(model.apply_final_norm(model.resid_post[1])) for _ in tracer.iter[:]]


def _direction(like: torch.Tensor, seed: int) -> torch.Tensor:
    direction = torch.randn(like.shape[-1], generator=torch.Generator().manual_seed(seed))
    return (direction / direction.norm()).to(like)


def project_out(model: Any, tracer: Any) -> Any:
    seen = []
    for _ in tracer.iter[:]:
        first = model.resid_post[0]
        v = _direction(first, 0)
        first -= (first @ v).unsqueeze(-1) * v
        second = model.resid_post[1]
        second[:] = second - (second @ v)[..., None] * v
        third = model.resid_post[2]
        third -= torch.outer(third @ v, v)
        seen += [third, model.resid_post[3], model.logits]
    return seen


def project_out_in_other_words(model: Any, tracer: Any) -> Any:
    seen = []
    for _ in tracer.iter[:]:
        x = model.resid_post[0]
        v, w = _direction(x, 1), _direction(x, 2)
        x *= 0.5
        x += 3 * w
        x[:] = -((x * v).sum(dim=-1, keepdim=True) * (v + w) / 2 - x)
        x -= 1
        mlp = model.model.layers[1].mlp.output
        mlp.sub_(torch.matmul(mlp, v)[:, None] * v, alpha=0.75)
        last = model.resid_post[2][-1]
        last -= (last @ w) * w
        stream = model.resid_post[3]
        model.resid_post[3] = stream + 2 * (stream @ v[:, None] @ v[None])
        seen += [mlp, last, model.logits]
    return seen


def project_out_in_float(model: Any, tracer: Any) -> Any:
    def without(rows: Any, v: Any) -> Any:
        flat = rows.reshape(rows.shape[0], -1).float()
        made = flat - 0.5 * (flat @ v)[:, None] * v
        return made.reshape(rows.shape).to(rows.dtype)

    seen = []
    for _ in tracer.iter[:]:
        rows = model.resid_post[1]
        rows[:] = without(rows, _direction(rows, 3).float())
        rows = model.resid_post[2]
        rows[[-1]] = without(rows[[-1]], _direction(rows, 3).float())
        seen += [rows, model.resid_post[3], model.logits]
    return seen


def keep_what_is_projected_out(model: Any, tracer: Any) -> Any:
    seen = []
    for _ in tracer.iter[:]:
        stream = model.resid_post[1]
        v = _direction(stream, 4)
        along = stream @ v
        stream -= along[:, None] * v
        stream = model.resid_post[2]
        projected = stream - (stream @ v)[:, None] * v
        stream += 1
        model.resid_post[2] = projected
        seen += [along / 64 + 1, projected, model.resid_post[3] @ v / 64 + 1, model.logits]
    return seen


def project_out_twice(model: Any, tracer: Any) -> Any:
    seen = []
    for _ in tracer.iter[:]:
        stream = model.resid_post[1]
        v, w = _direction(stream, 5), _direction(stream, 6)
        stream -= (stream @ v)[:, None] * v
        stream -= (stream @ w)[:, None] * w
        model.model.layers[2].output[0][:] -= (model.model.layers[2].output[1] @ v)[:, None] * v
        seen += [model.resid_post[3], model.logits]
    return seen


IN_TABLES = [project_out, project_out_in_other_words, project_out_in_float]
BLOCKS = [
    read_streams, read_modules, read_some_steps, record, add_in_place, add_to_a_part, scale_and_set, edit_and_keep,
    edit_then_look, edit_parts_and_their_sum, edit_twice, replace_output, replace_what_others_hold, leave_the_taps,
    edit_at_one_step, call_a_module, *IN_TABLES, keep_what_is_projected_out, project_out_twice,
]  # fmt: skip


def in_one_batch(engine: Any, settings: dict[str, Any]) -> list[Any]:
    """What each kind of block gives, all in one trace."""
    with engine.trace(**settings) as tracer:
        for i, block in enumerate(BLOCKS):
            with tracer.invoke(PROMPTS[i % 4]):
                value = block(engine, tracer)
                insitu.save(value)
    return value


@pytest.mark.parametrize("block", BLOCKS, ids=name_of)
def test_a_block_gives_what_it_gives_by_eager_steps(model: Any, llama: Any, block: Block) -> None:
    for _ in range(2):  # the second time it is known what the block does
        for prompt in PROMPTS[:2]:
            ours, wanted = [each.run(functools.partial(block, each), prompt, **SETTINGS) for each in (model, llama)]
            assert_same(ours, wanted, block.__name__)


def test_blocks_of_all_kinds_in_one_batch(model: Any, llama: Any) -> None:
    for ours, wanted, block in zip(in_one_batch(model, SETTINGS), in_one_batch(llama, SETTINGS), BLOCKS, strict=True):
        assert_same(ours, wanted, block.__name__)


@pytest.mark.parametrize(
    "block", [read_streams, read_modules, add_in_place, edit_at_one_step], ids=lambda b: b.__name__
)
def test_many_alike_in_one_batch(model: Any, llama: Any, block: Block) -> None:
    prompts = [[*PROMPTS[i % 4], 10 + i] for i in range(12)]
    for _ in range(2):
        ours, wanted = [each.run(functools.partial(block, each), prompts, **SETTINGS) for each in (model, llama)]
        assert_same(ours, wanted, block.__name__)


def test_the_paths_are_counted(model: Any) -> None:
    def paths(block: Block) -> tuple[int, int]:
        before = model.stats()
        model.run(functools.partial(block, model), PROMPTS[0], **SETTINGS)
        after = model.stats()
        return after.eager_steps - before.eager_steps, after.tapped_steps - before.tapped_steps

    for block in (read_streams, add_in_place, leave_the_taps):
        paths(block)
    assert paths(read_streams) == (0, 5)
    assert paths(leave_the_taps) == (5, 0)
    untraced = model.stats()
    plain(model, PROMPTS)
    assert model.stats().tapped_steps == untraced.tapped_steps
    assert model.stats().eager_steps == untraced.eager_steps


@pytest.mark.parametrize(
    ("taps", "error", "text"),
    [
        (["model.layers.*.mpl.output"], UnknownModuleError, r"model\.layers\.\*\.mlp"),
        (["model.layers.1"], ArgumentError, "names no place"),
        (["resid_post[9]"], ArgumentError, "layers 0 to 3"),
        (["model.layers.1.self_attn.rotary_emb.output"], SharedModuleError, "one module serves"),
        (["model.output"], LocationError, "compiled code begins"),
        (["lm_head.output"], LocationError, "never came to it"),
        (["router_logits"], LocationError, "no experts"),
    ],
)
def test_a_tap_that_can_not_be_is_refused_by_name(
    engines: Any, taps: list[str], error: type[InsituError], text: str
) -> None:
    with pytest.raises(error, match=text):
        with own_engine(engines, "llama", taps=taps):
            pass


@pytest.mark.parametrize(
    ("fault", "text"), [("zeros", "zeros"), ("elsewhere", r"what is at `model\.layers\.2\.output`")]
)
def test_a_tap_that_reads_zeros_or_elsewhere_is_refused(
    engines: Any, monkeypatch: pytest.MonkeyPatch, fault: str, text: str
) -> None:
    from insitu.engine.taps.install import Taps

    right = Taps.pass_by

    def wrong(self: Any, name: str, floating: Any, others: Any) -> None:
        if fault == "zeros" and name == "model.layers.1.output":
            floating = [torch.zeros_like(tensor) for tensor in floating]
        if fault == "elsewhere":
            one, two = "model.layers.1.output", "model.layers.2.output"
            name = {one: two, two: one}.get(name, name)
        right(self, name, floating, others)

    monkeypatch.setattr(Taps, "pass_by", wrong)
    with pytest.raises(LocationError, match=text):
        with own_engine(engines, "llama", taps=["resid_post"]):
            pass


@pytest.mark.parametrize("column", ["scale", "weight", "bias", "turn", "vector", "along", "onto"])
def test_a_table_that_edits_otherwise_is_refused(tapped: Any, monkeypatch: pytest.MonkeyPatch, column: str) -> None:
    from insitu.engine.taps.tables import Table

    with recorded(tapped):
        tapped.run(functools.partial(add_in_place, tapped), PROMPTS[0], **SETTINGS)
        taps = taps_of(tapped)
        taps.require_tables(taps.faults())
        right = Table.edit_and_copy

        def wrong(table: Table, tensors: Any, copies: Any) -> None:
            names = ["vector", "along", "onto"]
            if column in names:
                table.slots[:, [names.index(column), 3 + names.index(column)]] = -1
            else:
                number = ["scale", "weight", "bias", "turn"].index(column)
                table.factors[:, [number, 4 + number]] = 1.5
            right(table, tensors, copies)

        monkeypatch.setattr(Table, "edit_and_copy", wrong)
        with pytest.raises(LocationError, match=r"the table of `model\.layers\.0\.output` edits rows otherwise"):
            taps.require_tables(taps.faults())


def test_engines_with_other_taps_do_not_mix(tapped: Any, engines: Any, llama: Any) -> None:
    def block(model: Any) -> Callable[[Any], Any]:
        return lambda tracer: [model.resid_post[1] for _ in tracer.iter[:]]

    with own_engine(engines, "llama", enforce_eager=False, max_num_seqs=16, taps="resid_post[1]") as other:
        assert other.stats().tap_bytes == 0
        wanted = llama.run(block(llama), PROMPTS[0], **SETTINGS)
        for model in (other, tapped, other):
            before = model.stats().tapped_steps
            assert_same(model.run(block(model), PROMPTS[0], **SETTINGS), wanted, "resid_post[1]")
            assert model.stats().tapped_steps - before == 5


@pytest.mark.parametrize("block", IN_TABLES, ids=name_of)
@pytest.mark.parametrize("count", [1, 4])
def test_tables_take_a_direction_out(tapped: Any, block: Block, count: int) -> None:
    def steps() -> tuple[int, int]:
        before = tapped.stats()
        tapped.run(functools.partial(block, tapped), PROMPTS[:count], **SETTINGS)
        after = tapped.stats()
        return after.eager_steps - before.eager_steps, after.tapped_steps - before.tapped_steps

    with recorded(tapped):
        steps(), steps()
        eager, at_taps = steps()
    assert eager <= 1  # the first, of which a table has no rows
    assert eager + at_taps >= SETTINGS["max_tokens"]


def test_promised_visits_and_edits_of_tables_are_counted(tapped: Any) -> None:
    def counts(block: Block, prompts: Any) -> tuple[int, int]:
        before = tapped.stats()
        tapped.run(functools.partial(block, tapped), prompts, **SETTINGS)
        after = tapped.stats()
        return after.promised_visits - before.promised_visits, after.table_edits - before.table_edits

    def edits_and_looks(model: Any, tracer: Any) -> Any:
        for _ in tracer.iter[:]:
            model.resid_post[1] += 1
            insitu.save(model.resid_post[2].norm())

    with recorded(tapped):
        for block in (project_out, read_some_steps, edits_and_looks):
            counts(block, PROMPTS[:1])
        assert counts(project_out, PROMPTS[:1]) == (4 * 4, 4 * 3)  # in steps after the prefill
        assert counts(project_out, PROMPTS[:2]) == (2 * 4 * 4, 2 * 4 * 3)
        assert counts(read_some_steps, PROMPTS[:1]) == (2, 0)
        assert counts(edits_and_looks, PROMPTS[:1]) == (0, 0)


def test_an_edit_by_promise_counts_as_one(tapped: Any) -> None:
    """Of a block that has edited, a preempted request can't just be computed again."""
    interleaver = taps_of(tapped).shown.__self__
    seen: list[tuple[bool, bool]] = []

    def block(tracer: Any) -> None:
        from insitu.tree import current

        for step in tracer.iter[:]:
            if step:
                tapped.resid_post[1] += 1
                promised = bool(interleaver.ahead.now)
                tapped.logits
                seen.append((promised, current.get().edited))

    with recorded(tapped):
        for _ in range(2):
            tapped.run(block, PROMPTS[0], **SETTINGS)
    assert seen[-4:] == [(True, True)] * 4
