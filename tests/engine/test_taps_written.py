"""Directions that are taken out at taps by recipes, forms and restricted blocks, by the tables in the graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from insitu import recipes
from insitu.net.form import parsed
from insitu.net.form_block import form_block
from tests.engine import remote
from tests.engine.taps import PROMPTS, SETTINGS, assert_same, recorded
from tests.models import WIDTH

pytestmark = [pytest.mark.slow, pytest.mark.in_process]

VECTOR = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))


def steering(model: Any) -> Any:
    none = recipes.Steering(model, VECTOR, "resid_post[1]", how="project_out", scale=0.75)
    return model.run(_and_look(model, none), PROMPTS[0], **SETTINGS)


def form(model: Any) -> Any:
    at_all = {"do": "project_out", "when": "all", "vector": VECTOR.tolist()}
    actions = [
        {"do": "add", "at": "resid_post[0]", "when": "all", "vector": VECTOR.tolist()},
        {**at_all, "at": "resid_post[0]"},
        {"do": "scale", "at": "model.layers.1.mlp.output", "when": "all", "scale": 2},
        {**at_all, "at": "resid_post[1]", "positions": "last", "scale": 0.5},
    ]
    return model.run(_and_look(model, form_block(parsed({"actions": actions}), model)), PROMPTS[0], **SETTINGS)


def restricted(model: Any) -> Any:
    def block(tracer: Any) -> Any:
        seen = []
        for _ in tracer.iter[:]:
            x = model.resid_post[1]
            x -= (x @ unit).unsqueeze(-1) * unit
            y = model.resid_post[2]
            y[:] = y - torch.outer(y @ unit, unit)
            seen += [model.resid_post[3], model.logits]
        return seen

    unit = VECTOR / VECTOR.norm()
    return remote.run(model, block, PROMPTS[0], **SETTINGS)


def _and_look(model: Any, edit: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        cache = tracer.cache(["model.layers.3"], device="cpu")
        edit(tracer)
        return cache

    return block


@pytest.mark.parametrize("written", [steering, form, restricted])
def test_a_direction_taken_out_in_each_step(tapped: Any, llama: Any, written: Callable[[Any], Any]) -> None:
    wanted = written(llama)
    for _ in range(2):
        assert_same(written(tapped), wanted, "between pieces")
    with recorded(tapped):
        for _ in range(2):
            assert_same(written(tapped), wanted, "recorded")
        before = tapped.stats()
        written(tapped)
        after = tapped.stats()
    assert after.eager_steps - before.eager_steps <= 1  # the first, of which a table has no rows
    assert after.table_edits - before.table_edits >= SETTINGS["max_tokens"] - 1
