"""A form does what the block does that one would write by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import insitu
from insitu.net.errors import FormError
from insitu.net.form import parsed
from insitu.net.form_block import form_block
from tests.engine.helpers import PROMPT, own_engine, trunk

SAMPLING = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}
SCALE = 3.0


def done(model: Any, *actions: dict[str, Any], **sampling: Any) -> Any:
    """What a form with these actions reads."""
    form = parsed({"actions": list(actions)})
    return model.run(form_block(form, model), PROMPT, **{**SAMPLING, **sampling})


def width(model: Any) -> int:
    return model.run(lambda tracer: model.embed.shape[-1], PROMPT, max_tokens=1)


def vector(model: Any) -> torch.Tensor:
    return torch.linspace(-1, 2, width(model))


def direction_of(vector: torch.Tensor) -> torch.Tensor:
    return (vector.double() / vector.double().norm()).float()


FACTORS = pytest.mark.parametrize("factor", [1.0, 1e-60, 1e-30, 1e30])
"""The vector times these has the same direction: the squares of the last two lie beyond float32, so does the second."""


LOGITS = {"do": "read", "at": "logits", "as": "logits", "when": "all"}


def logits_of(model: Any, edit: Any) -> list[torch.Tensor]:
    """Those of each step, with an edit made at the stream after layer 1."""

    def block(tracer: Any) -> Any:
        found = []
        for step in tracer.iter[:]:
            edit(step, model.resid_post[1])
            found.append(model.logits.clone())
        return found

    return model.run(block, PROMPT, **SAMPLING)


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted) == 3
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_reading(model: Any) -> None:
    found = done(
        model,
        LOGITS,
        {"do": "read", "at": "resid_post[1]", "as": "all"},
        {"do": "read", "at": "resid_post[-1]", "as": "last", "positions": "last"},
        {"do": "read", "at": "embed", "as": "some", "positions": [0, -2]},
        {"do": "read", "at": "attn_out[0]", "as": "text", "positions": {"text": "Eiffel"}},
        {"do": "read", "at": "mlp_out[0]", "as": "steps", "when": [0, 2]},
        {"do": "read", "at": "mlp_out[0]", "as": "second", "when": 1},
        {"do": "read", "at": "mlp_out[0]", "as": "generated", "when": "generated"},
        {"do": "read", "at": "attn_pattern[1]", "as": "pattern", "positions": "last"},
    )

    def block(tracer: Any) -> Any:
        got: dict[str, Any] = {"mlp": [], "logits": []}
        for step in tracer.iter[:]:
            if step == 0:
                got["some"] = model.embed[[0, -2]]
                got["text"] = model.attn_out[0][list(tracer.positions_of("Eiffel"))]
            got["mlp"].append(model.mlp_out[0].clone())
            if step == 0:
                got["pattern"] = model.attn_pattern[1][:, [-1]]
                got["all"] = model.resid_post[1].clone()
                got["last"] = model.resid_post[-1][[-1]]
            got["logits"].append(model.logits.clone())
        return got

    wanted = model.run(block, PROMPT, **SAMPLING)
    assert_same(found["logits"], wanted["logits"])
    for name in ("all", "last", "some", "text", "pattern"):
        assert torch.equal(found[name], wanted[name]), name
    assert [tuple(value.shape) for value in found["steps"]] == [tuple(wanted["mlp"][i].shape) for i in (0, 2)]
    assert all(torch.equal(a, wanted["mlp"][i]) for a, i in zip(found["steps"], (0, 2), strict=True))
    assert torch.equal(found["second"], wanted["mlp"][1])
    assert all(torch.equal(a, b) for a, b in zip(found["generated"], wanted["mlp"][1:], strict=True))


WHEN = {
    "prompt": lambda step: step == 0,
    "generated": lambda step: step > 0,
    "all": lambda step: True,
    1: lambda step: step == 1,
    (0, 2): lambda step: step in (0, 2),
}


@pytest.mark.parametrize("when", WHEN, ids=str)
def test_adding_a_vector(model: Any, when: Any) -> None:
    v = vector(model)
    given = list(when) if isinstance(when, tuple) else when
    add = {"do": "add", "at": "resid_post[1]", "vector": v.tolist(), "scale": SCALE, "when": given}
    found = done(model, add, LOGITS)

    def edit(step: int, stream: torch.Tensor) -> None:
        if WHEN[when](step):
            stream += SCALE * v

    assert_same(found["logits"], logits_of(model, edit))


@FACTORS
def test_adding_a_vector_of_the_norm_of_each_row(model: Any, factor: float) -> None:
    v = vector(model)
    given = {"vector": (v.double() * factor).tolist(), "scale": 0.5, "match_norm": True}
    add = {"do": "add", "at": "resid_post[1]", "when": "all", **given}

    def edit(step: int, stream: torch.Tensor) -> None:
        stream += 0.5 * stream.norm(dim=-1, keepdim=True) * direction_of(v)

    assert_same(done(model, add, LOGITS)["logits"], logits_of(model, edit))


def test_setting_a_vector_at_positions(model: Any) -> None:
    v = vector(model)
    put = {"do": "set", "at": "resid_post[1]", "vector": v.tolist(), "positions": [1, -1]}

    def edit(step: int, stream: torch.Tensor) -> None:
        if step == 0:
            stream[[1, -1]] = v

    assert_same(done(model, put, LOGITS)["logits"], logits_of(model, edit))


@FACTORS
def test_projecting_a_vector_out(model: Any, factor: float) -> None:
    v = vector(model)
    take = {"do": "project_out", "at": "resid_post[1]", "vector": (v.double() * factor).tolist(), "when": "all"}
    after = {"do": "read", "at": "resid_post[1]", "as": "after"}
    found = done(model, take, after, LOGITS)

    def edit(step: int, stream: torch.Tensor) -> None:
        direction = direction_of(v)
        stream -= (stream @ direction)[:, None] * direction

    assert_same(found["logits"], logits_of(model, edit))
    assert (found["after"] @ (v / v.norm())).abs().max() < 1e-4


def test_scaling(model: Any) -> None:
    scale = {"do": "scale", "at": "resid_post[1]", "scale": 0.25, "positions": "last", "when": "all"}

    def edit(step: int, stream: torch.Tensor) -> None:
        stream[-1] *= 0.25

    assert_same(done(model, scale, LOGITS)["logits"], logits_of(model, edit))


def test_a_module_s_place(model: Any) -> None:
    path = f"{trunk(model)._path}.{'h' if 'transformer' in dir(model) else 'layers'}.1.mlp"
    found = done(
        model,
        {"do": "scale", "at": f"{path}.output", "scale": 0},
        {"do": "read", "at": f"{path}.output", "as": "after"},
        {"do": "read", "at": "resid_post[1]", "as": "stream"},
    )

    def block(tracer: Any) -> Any:
        model.get(path).output[:] = 0
        return model.resid_post[1].clone()

    assert not found["after"].any()
    assert torch.equal(found["stream"], model.run(block, PROMPT, **SAMPLING))


def test_heads_are_edited_as_one_vector(model: Any) -> None:
    size = model.run(lambda tracer: model.v[1][0].numel(), PROMPT, max_tokens=1)
    v = torch.linspace(0, 1, size)
    found = done(
        model,
        {"do": "set", "at": "v[1]", "vector": v.tolist(), "positions": [2]},
        {"do": "read", "at": "v[1]", "as": "after", "positions": [2]},
    )
    assert torch.equal(found["after"].flatten(), v)


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (
            {"do": "read", "at": "resid_post[99]", "as": "h"},
            FormError,
            r"the model has \d layers.*\$\.actions\[0\]\.at",
        ),
        ({"do": "read", "at": "model.nothing.output", "as": "h"}, FormError, "no module"),
        ({"do": "add", "at": "resid_post[1]", "vector": [1.0]}, FormError, r"has 1 numbers, and 'resid_post\[1\]' is"),
        ({"do": "read", "at": "embed", "as": "h", "positions": [99]}, FormError, "position 99 of"),
        ({"do": "scale", "at": "embed", "scale": 2, "positions": [0, 0]}, FormError, "a position comes twice"),
        ({"do": "read", "at": "logits", "as": "h", "when": 7}, insitu.NotReachedError, "ended after 3 steps"),
        ({"do": "read", "at": "logits", "as": "h", "positions": {"text": "Rome"}}, insitu.PromptError, "Rome"),
    ],
)
def test_what_does_not_fit_is_said_and_never_left_out(
    model: Any, action: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        done(model, action)
    assert model.in_flight() == 0


def test_a_step_that_is_not_reached_beside_those_that_are(model: Any) -> None:
    late = {"do": "read", "at": "embed", "as": "h", "when": 9}
    with pytest.raises(insitu.NotReachedError, match=r"\$\.actions\[1\] was to reach step 9, but .* after 3 steps"):
        done(model, LOGITS, late)


def test_a_form_reads_so_much_at_most(model: Any) -> None:
    form = parsed({"actions": [LOGITS]})
    with pytest.raises(insitu.LimitError, match="this form reads more than 100 bytes"):
        model.run(form_block(form, model, saved_bytes=100), PROMPT, **SAMPLING)


def test_a_form_runs_in_workers_and_in_half_precision(engines: Any) -> None:
    with own_engine(engines, "llama", dtype="bfloat16", engine="workers") as model:
        v = vector(model)
        found = done(model, {"do": "set", "at": "resid_post[1]", "vector": v.tolist()}, {
            "do": "read", "at": "resid_post[1]", "as": "h"})  # fmt: skip
        assert found["h"].dtype == torch.bfloat16
        assert torch.allclose(found["h"].float(), v.expand_as(found["h"]), atol=0.02)
