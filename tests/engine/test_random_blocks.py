"""Random blocks in random company do what they do alone: what a hand-written case would not think of."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.engine.helpers import completed, difference, enqueue, own_engine, plain
from tests.engine.locations import tensors_in
from tests.models import LAYERS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("several_threads")]

# A Llama layer's places in the order of the forward.
PLACES = [
    (path, site)
    for path, *sites in [
        ("", "inputs"),
        ("input_layernorm", "inputs", "output"),
        ("self_attn", "inputs"),
        ("self_attn.qkv_proj", "inputs", "output"),
        ("self_attn.rotary_emb", "inputs", "output"),
        ("self_attn.attn", "inputs", "output"),
        ("self_attn.o_proj", "inputs", "output"),
        ("self_attn", "output"),
        ("post_attention_layernorm", "inputs", "output"),
        ("mlp", "inputs"),
        ("mlp.gate_up_proj", "inputs", "output"),
        ("mlp.act_fn", "inputs", "output"),
        ("mlp.down_proj", "inputs", "output"),
        ("mlp", "output"),
        ("", "output"),
    ]
    for site in sites
]
BOUND = 3e-5  # a difference of one row alone and rows together, after some edited layers


@dataclass(frozen=True)
class Program:
    """What a block does at which places of which steps, and what it does to the tokens drawn."""

    ids: list[int]
    steps: list[dict[tuple[int, int], str]]
    banned: bool
    forced: int | None

    @classmethod
    def drawn(cls, rng: random.Random) -> Program:
        steps = []
        for _ in range(rng.randint(1, 5)):
            places = [(rng.randrange(LAYERS), rng.randrange(len(PLACES))) for _ in range(rng.randint(0, 5))]
            steps.append({place: rng.choice(["read", "edit", "row", "replace"]) for place in sorted(places)})
        ids = rng.choices(range(4, 480), k=rng.choice([2, 3, 5, 17, 40, 64, 90]))
        return cls(ids, steps, rng.random() < 0.5, rng.choice([None, None, 7, 200]))

    @property
    def tokens(self) -> int:
        return len(self.steps) + 1

    def block(self, model: Any) -> Callable[[Any], tuple[list[torch.Tensor], list[int]]]:
        def run(tracer: Any) -> tuple[list[torch.Tensor], list[int]]:
            seen: list[torch.Tensor] = []
            for step in tracer.iter[: len(self.steps)]:
                for (layer, place), kind in self.steps[step].items():
                    path, site = PLACES[place]
                    node = model.get(f"model.layers.{layer}.{path}".rstrip("."))
                    value = getattr(node, site)
                    seen += floating(value)
                    if kind == "replace":
                        setattr(node, site, mapped(value))
                    elif kind != "read":
                        for tensor in floating(value):
                            tensor[-1 if kind == "row" else slice(None)] *= 1.1
                if self.banned:
                    model.logits[:, 100:140] = -1e4
                seen.append(model.logits)
                if self.forced is not None and step == 1:
                    model.samples[0] = self.forced
            return seen, list(tracer.result.outputs[0].token_ids)

        return run


def floating(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]


def mapped(value: Any) -> Any:
    """The same structure with other numbers in it."""
    if isinstance(value, torch.Tensor):
        return value * 0.9 + 0.01 if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: mapped(part) for key, part in value.items()}
    return tuple(mapped(part) for part in value) if isinstance(value, tuple) else value


@pytest.fixture(scope="module")
def model(engines: Any) -> Iterator[Any]:
    """Few at a time, prompts in chunks where they may be, blocks of the KV cache small enough to be shared."""
    with own_engine(
        engines, "llama", max_num_seqs=5, max_num_batched_tokens=96, enable_chunked_prefill=True, block_size=32
    ) as model:
        yield model


@pytest.mark.parametrize("seed", range(8))
def test_in_company_as_alone(model: Any, seed: int) -> None:
    rng = random.Random(seed)
    programs = [Program.drawn(rng) for _ in range(rng.randint(2, 10))]
    settings = {"temperature": 0.0, "ignore_eos": True}
    alone = [model.run(one.block(model), one.ids, max_tokens=one.tokens, **settings) for one in programs]
    others = [rng.choices(range(4, 480), k=rng.randint(1, 120)) for _ in range(rng.randint(1, 6))]
    counts = [rng.randint(1, 9) for _ in others]
    expected = [
        plain(model, [ids], max_tokens=count, ignore_eos=True)[0].outputs[0].token_ids
        for ids, count in zip(others, counts, strict=True)
    ]
    enqueue(model, others, counts)
    together: list[Any] = [None] * len(programs)
    with model.trace(**settings) as tracer:
        together.save()
        for i, one in enumerate(programs):
            with tracer.invoke(one.ids, max_tokens=one.tokens):
                together[i] = one.block(model)(tracer)
    assert [output.outputs[0].token_ids for output in completed(model)] == expected
    for i, ((values, tokens), (wanted, wanted_tokens)) in enumerate(zip(together, alone, strict=True)):
        assert tokens == wanted_tokens, f"block {i}: {programs[i]}"
        worst = max(difference(*pair) for pair in zip(values, wanted, strict=True))
        assert worst <= BOUND, f"block {i}: {worst:.1e}, {programs[i]}"
    assert model.in_flight() == 0
