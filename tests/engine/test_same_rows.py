"""Which edits do the same to every row, as far as their text tells. No engine runs here."""

from __future__ import annotations

import linecache
import random
from typing import Any

import pytest
import torch

import insitu
from insitu.block import CapturedBody, Site
from insitu.engine.client.edit import Edit, EditTracer

model = insitu.VLLM("nothing-is-loaded")
tracer = EditTracer(None)
layer = model.model.layers[3]
vector, scale, index, places = torch.ones(8), 0.5, 2, [1, 2]
row, rows, matrix = torch.ones(1, 8), torch.ones(3, 8), torch.ones(2, 2, 8)
vectors, by_layer, mixed = [torch.ones(8), torch.ones(8)], {1: torch.ones(8)}, [torch.ones(8), torch.ones(3, 8)]


class Captured(CapturedBody):
    def __init__(self) -> None:
        self.edit = Edit(None, None)  # type: ignore[arg-type]

    def target(self) -> Any:
        return self.edit

    def run_block(self, site: Site) -> None:
        self.edit.job(site)


def judged(body: str) -> bool:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    source = f"with Captured() as edit:\n{lines}\n"
    name = f"<{body}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names = {**globals()}
    exec(compile(source, name, "exec"), names)
    return names["edit"].same_for_rows


SAME = [
    "for _ in tracer.all():\n    model.resid_post[1][:] += vector",
    "for step in tracer.iter[:]:\n    model.resid_post[-1] += vector * scale - 2",
    "with tracer.all():\n    model.resid_pre[index][...] *= 0.5",
    "with tracer.iter[:] as step:\n    layer.mlp.output[:] = row",
    "for _ in tracer.all():\n    model.model.layers[index].mlp.down_proj.input[:] /= -vector",
    "for _ in tracer.all():\n    for i in places:\n        model.resid_post[i][:] += vectors[i]",
    "for _ in tracer.all():\n    for i in range(2):\n        model.attn_out[i][:] += rows[i]",
    "for _ in tracer.all():\n    model.embed[:] += by_layer[1]",
    "for _ in tracer.all():\n    model.logits[:] -= 1\n    pass",
]
OTHERWISE = [
    "model.resid_post[1][:] += vector",  # the prompt alone
    "for _ in tracer.iter[1:]:\n    model.resid_post[1][:] += vector",
    "for _ in tracer.iter[:4]:\n    model.resid_post[1][:] += vector",
    "for step in tracer.all():\n    model.resid_post[1][:] += step",
    "for vector in tracer.all():\n    model.resid_post[1][:] += vector",
    "for step in tracer.all():\n    if step:\n        model.resid_post[1][:] += vector",
    "for _ in tracer.all():\n    model.resid_post[1][-1] += vector",
    "for _ in tracer.all():\n    model.resid_post[1][2:] += vector",
    "for _ in tracer.all():\n    layer.output[0][:] += vector",  # of a plain tensor, its first row
    "for _ in tracer.all():\n    model.resid_post[1][:] += rows",
    "for _ in tracer.all():\n    model.resid_post[1][:] += mixed[0]",
    "for _ in tracer.all():\n    model.resid_post[1][:] += matrix[0]",
    "for _ in tracer.all():\n    model.resid_post[1][:] += rows[:2]",
    "for _ in tracer.all():\n    model.resid_post[1][:] += torch.randn(8)",
    "for _ in tracer.all():\n    model.resid_post[1][:] += random.random()",
    "for _ in tracer.all():\n    model.resid_post[1][:] += model.resid_post[0]",
    "for _ in tracer.all():\n    model.resid_post[1][:] @= vector",
    "for _ in tracer.all():\n    model.samples[:] = 3",
    "for _ in tracer.all():\n    model.resid_post[1] = vector",
    "for _ in tracer.all():\n    model.attn_pattern[1][:] += vector",
    "for _ in tracer.all():\n    layer.source.attn.output[:] += vector",
    "for _ in tracer.all():\n    hidden = model.resid_post[1].save()",
    "for _ in tracer.all():\n    model.resid_post[1][:] += vector\nvector = 3",
    "for _ in tracer.all():\n    model.resid_post[1][:] += vector\n    break",
    "for _ in tracer.all():\n    model.resid_post[1][:] += vector\nelse:\n    tracer.stop()",
    "for _ in places:\n    model.resid_post[1][:] += vector",
    "pass",
]


@pytest.mark.parametrize("body", SAME)
def test_the_same(body: str) -> None:
    assert judged(body)


@pytest.mark.parametrize("body", OTHERWISE)
def test_otherwise(body: str) -> None:
    assert random
    assert not judged(body)


def test_range_is_pythons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "range", lambda count: places)
    assert not judged("for _ in tracer.all():\n    for i in range(2):\n        model.resid_post[i][:] += vector")
