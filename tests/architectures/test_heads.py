"""Attention by head means on every architecture what it means in transformers, and in vLLM's own kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import insitu
from tests import models
from tests.architectures.configs import HEAD, HEADS, LAYERS
from tests.architectures.found import write_down
from tests.architectures.heads import HeadsOf, by_hand, heads
from tests.architectures.tiny import tiny
from tests.engine.helpers import assert_close, difference

# Longer than the windows of the tiny models.
PROMPT = "The Eiffel Tower is in the city of Paris; water boils at one hundred degrees, and it freezes at zero"
STEPS = 4
BOUND = 1e-4
Seen = dict[str, list[list[torch.Tensor]]]


def ids_of(name: str) -> list[int]:
    return models.encode(tiny(name), PROMPT)


def attention(model: Any, layer: int) -> Any:
    """The attention module of a layer, found by its class."""
    modules = model._running().outline.modules
    return model.get([path for path, module in modules.items() if module.kind == "Attention"][layer])


@functools.lru_cache(maxsize=1)
def everything(name: str, model: Any) -> tuple[Seen, list[int]]:
    """By name a list over layers of lists over steps; the ids of all tokens that were computed."""

    def block(tracer: Any) -> tuple[Seen, Any]:
        found: Seen = {key: [[] for _ in range(LAYERS)] for key in ("q", "k", "v", "attn_pattern", "returned")}
        for _ in tracer.iter[:]:
            for i in range(LAYERS):
                found["v"][i].append(model.v[i].clone())
                found["attn_pattern"][i].append(model.attn_pattern(i).clone())
                found["q"][i].append(model.q[i].clone())
                found["k"][i].append(model.k[i].clone())
                found["returned"][i].append(attention(model, i).output.clone())
        return found, tracer.result

    found, result = model.run(block, PROMPT, temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    return found, [*ids_of(name), *result.outputs[0].token_ids[:-1]]


@functools.lru_cache(maxsize=1)
def hf(name: str, ids: tuple[int, ...]) -> HeadsOf:
    return heads(name, ids)


def squared(patterns: list[torch.Tensor]) -> torch.Tensor:
    """The patterns of all steps as one, ``[heads, tokens, tokens]``."""
    keys = patterns[-1].shape[-1]
    return torch.cat([torch.nn.functional.pad(each, (0, keys - each.shape[-1])) for each in patterns], 1)


def times_values(pattern: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    repeated = v.repeat_interleave(len(pattern) // v.shape[1], 1)
    return torch.einsum("hqk,khd->qhd", pattern, repeated).flatten(1)


def test_queries_keys_values_and_pattern_are_those_of_transformers(name: str, model: Any) -> None:
    found, ids = everything(name, model)
    wanted = hf(name, tuple(ids))
    differences = {}
    for i in range(LAYERS):
        differences["attn_pattern", i] = (
            (squared(found["attn_pattern"][i]) - wanted["attn_pattern", i]).abs().max().item()
        )
        for key in ("q", "k", "v"):
            if (key, i) in wanted:
                differences[key, i] = difference(torch.cat(found[key][i]), wanted[key, i])
    of_pattern = [value for (key, _), value in differences.items() if key == "attn_pattern"]
    of_heads = [value for (key, _), value in differences.items() if key != "attn_pattern"]
    write_down(name, {"attn_pattern": max(of_pattern), "q, k, v": max(of_heads, default=None)})
    assert {place: found for place, found in differences.items() if found > BOUND} == {}
    assert len(model.attn_pattern) == len(model.q) == LAYERS


def test_the_pattern_is_causal_and_its_rows_sum_to_one(name: str, model: Any) -> None:
    found, ids = everything(name, model)
    length = len(ids_of(name))
    for i in range(LAYERS):
        patterns = found["attn_pattern"][i]
        assert [tuple(each.shape) for each in patterns] == [
            (HEADS, length, length),
            *((HEADS, 1, length + step) for step in range(1, STEPS)),
        ]
        assert all(each.dtype == torch.float32 for each in patterns)
        whole = squared(patterns)
        assert not whole.triu(1).any()
        torch.testing.assert_close(whole.sum(-1), torch.ones(HEADS, len(ids)))
        assert [each.shape[1:] for each in found["q"][i]] == [(HEADS, HEAD)] * STEPS


def test_pattern_times_values_is_what_attention_returns(name: str, model: Any) -> None:
    found, _ = everything(name, model)
    for i in range(LAYERS):
        computed = times_values(squared(found["attn_pattern"][i]), torch.cat(found["v"][i]))
        assert_close(computed, torch.cat(found["returned"][i]), f"layer {i}")


def whole_prompt(length: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[:length] = value[:length] * 0.5 + 0.25
        return value

    return edit


def one_head(length: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[2 : length // 2, 0] *= -2
        return value

    return edit


def write(stream: Any, layer: int, edit: Any, assign: bool) -> None:
    value = stream[layer]
    if assign:
        stream[layer] = edit(value)
    else:
        value[2 : len(value) // 2, 0] *= -2


@pytest.mark.parametrize("key", ["q", "k", "v"])
def test_a_write_is_what_attention_goes_on_with(name: str, model: Any, key: str) -> None:
    """Compared with the same edit in transformers, this and the next step, in company that stays as it is."""
    length = len(ids_of(name))
    edits = [whole_prompt(length), one_head(length)]

    def block(edit: Any, assign: bool) -> Any:
        def run(tracer: Any) -> Any:
            seen = []
            for step in tracer.iter[:]:
                if step == 0 and edit is not None:
                    write(getattr(model, key), 1, edit, assign)
                pattern, v = model.attn_pattern[1].clone(), model.v[1].clone()
                seen.append((pattern, v, attention(model, 1).output.clone(), model.logits.clone()))
                if step == 0:
                    model.samples[0] = 7
            return seen

        return run

    settings = {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True}
    plain = model.run(block(None, False), [PROMPT] * 4, **settings)
    with model.trace(**settings) as tracer:
        with tracer.invoke(PROMPT):
            before = block(None, False)(tracer).save()
        with tracer.invoke(PROMPT):
            assigned = block(edits[0], True)(tracer).save()
        with tracer.invoke(PROMPT):
            in_place = block(edits[1], False)(tracer).save()
        with tracer.invoke(PROMPT):
            after = block(None, False)(tracer).save()
    for company, its in ((before, plain[0]), (after, plain[3])):
        assert all(a.equal(b) for step in range(2) for a, b in zip(company[step], its[step], strict=True))
    ids = [*ids_of(name), 7]
    for edit, seen in zip(edits, (assigned, in_place), strict=True):
        pattern, v = squared([each[0] for each in seen]), torch.cat([each[1] for each in seen])
        assert_close(times_values(pattern, v), torch.cat([each[2] for each in seen]), f"{key}, pattern times values")
        assert difference(seen[0][2], plain[0][0][2]) > 1e-3, f"{key} changed nothing"
        if not by_hand(name):
            wanted = heads(name, ids, (key, 1, edit))
            logits = torch.cat([each[3] for each in seen])
            assert_close(pattern, wanted["attn_pattern", 1], f"{key}, pattern", BOUND)
            assert_close(logits, wanted.logits[-2:], f"{key}, logits")


def test_the_pattern_can_t_be_written(name: str, model: Any) -> None:
    def assigns(tracer: Any) -> None:
        model.attn_pattern[1] = torch.zeros(HEADS, 1, 1)

    def edits(tracer: Any) -> None:
        model.attn_pattern[1][:] = 0
        model.attn_out[1].sum()

    for block in (assigns, edits):
        with pytest.raises(insitu.WriteError, match=r"`model.attn_pattern\[1\]` is computed from q and k"):
            model.run(block, PROMPT, max_tokens=1)
