"""Restricted blocks of a client's trace run once for all its prompts at a real server, and for nobody else's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from insitu import LimitError
from tests.engine import served
from tests.engine.cohorts import same
from tests.engine.served import ANN, BEN, KEY, Server, key_file

pytestmark = [pytest.mark.slow, pytest.mark.in_process]
PROMPTS = [[5 + number % 7, *range(5, 8 + number % 5)] for number in range(48)]
ann, ben, client = served.ann, served.ben, served.client
VECTORS = torch.randn(len(PROMPTS), 128, generator=torch.Generator().manual_seed(0))
_PLAIN: dict[str, Any] = {"temperature": 0.0, "max_tokens": 3}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits = {"saved_bytes": 3000, "operations": 20_000}
    keys = {"name": "ann", "key": ANN}, {"name": "ben", "key": BEN, "limits": limits}
    made = Server("--api-key", KEY, "--insitu-keys", key_file(tmp_path_factory, *keys))
    yield made
    made.close()


def steered(model: Any, prompts: list[list[int]], vectors: torch.Tensor) -> Any:
    with model.trace(**GREEDY) as tracer:
        for prompt, vector in zip(prompts, vectors, strict=True):
            with tracer.invoke(prompt):
                seen = [].save()
                for _ in tracer.iter[:]:
                    model.resid_post[1][:] += vector
                    seen.append(model.logits[0])
    return seen  # pyright: ignore[reportPossiblyUnboundVariable]


def rows(model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    return model.run(lambda tracer: model.resid_post[2], prompts, temperature=0.0, max_tokens=1)


def together(model: Any) -> int:
    return model.stats()["blocks_together"]


def test_one_run_for_all_prompts_of_a_trace(ann: Any) -> None:
    steered(ann, PROMPTS[:1], VECTORS[:1])
    before = together(ann)
    found = steered(ann, PROMPTS, VECTORS)
    assert together(ann) - before > len(PROMPTS) // 2  # as many as begin in a step
    alone = [steered(ann, PROMPTS[at : at + 1], VECTORS[at : at + 1]) for at in range(len(PROMPTS))]
    assert same([part for each in found for part in each], [part for each in alone for part in each])


def test_a_form_runs_once_for_the_prompts_of_a_call(ann: Any, client: Any) -> None:
    """Of a key that may send forms, beside OpenAI's own route."""
    steer = {"do": "add", "at": "resid_post[1]", "vector": VECTORS[0].tolist(), "scale": 2.0, "when": "all"}
    form = {"actions": [steer, {"do": "read", "at": "resid_post[3]", "as": "rows", "when": "all"}]}

    def read(prompts: list[list[int]]) -> list[Any]:
        asked = {"model": "tiny", "prompt": prompts, "extra_body": {"insitu": form}, **_PLAIN}
        return [choice.insitu["saves"]["rows"] for choice in client.completions.create(**asked).choices]

    read(PROMPTS[:1])
    before = together(ann)
    found = read(PROMPTS)
    assert together(ann) > before
    assert found == [read([prompt])[0] for prompt in PROMPTS]


def test_each_key_has_its_own_limits(ann: Any, ben: Any) -> None:
    """Both send the same text at once."""
    rows(ann, PROMPTS)
    with ThreadPoolExecutor(2) as pool:
        mine, others = pool.submit(rows, ann, PROMPTS), pool.submit(rows, ben, PROMPTS)
        found = mine.result()
        with pytest.raises(Exception) as failed:
            others.result()
    assert [len(each) for each in found] == [len(prompt) for prompt in PROMPTS]
    errors = failed.value.exceptions  # type: ignore[attr-defined]
    assert all(isinstance(each, LimitError) for each in errors)
    beyond = [number for number, prompt in enumerate(PROMPTS) if len(prompt) * 512 + 16 > 3000]
    assert [each.invoke for each in errors] == beyond


def test_a_block_without_end_takes_nobody_along(ann: Any, ben: Any) -> None:
    def endless(tracer: Any) -> Any:
        hidden = ben.resid_post[1]
        while True:
            hidden = hidden + 1

    with ThreadPoolExecutor(2) as pool:
        others = pool.submit(lambda: ben.run(endless, PROMPTS[:6], temperature=0.0, max_tokens=1))
        time.sleep(0.1)
        found = rows(ann, PROMPTS)
        with pytest.raises(Exception) as failed:
            others.result()
    assert same(found, rows(ann, PROMPTS))
    errors: Any = failed.value
    assert {str(each) for each in errors.exceptions} == {"this block was stopped: it has done 20000 operations"}
    assert ann.in_flight() == 0
