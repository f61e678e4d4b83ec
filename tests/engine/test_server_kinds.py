"""Servers of other kinds than the plain one: on two ranks with adapters, and of a small real model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from vllm.lora.request import LoRARequest

import insitu
from tests.engine.helpers import PROMPT, assert_close, hf_stream, ids_of, own_engine
from tests.engine.served import Server
from tests.engine.test_lora import RANK, write_adapter

pytestmark = [pytest.mark.slow, pytest.mark.in_process]

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}
LORA = {"enable_lora": True, "max_loras": 1, "max_lora_rank": RANK}


class Ranks(NamedTuple):
    url: str
    model: Any
    adapter: str
    """Its folder."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    adapter = write_adapter(tmp_path_factory.mktemp("adapters") / "one", 1)
    two = ("--tensor-parallel-size", "2", "--max-num-seqs", "8")
    lora = ("--enable-lora", "--max-loras", "1", "--max-lora-rank", str(RANK), "--lora-modules", f"one={adapter}")
    made = Server(*two, *lora, environment={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "0|1"})
    yield Ranks(made.url, insitu.connect(made.url), adapter)
    made.close()


def read(model: Any, **settings: Any) -> dict[str, Any]:
    with model.trace(PROMPT, **GREEDY, **settings):
        hidden = model.resid_post[2].save()
        logits = model.logits.save()
    return {"hidden": hidden, "logits": logits}


def test_a_server_on_two_ranks_gives_the_values_of_one(ranks: Ranks) -> None:
    values, wanted = read(ranks.model), hf_stream("llama", ids_of("llama"))
    assert_close(values["hidden"], wanted.resid_post[2])
    assert_close(values["logits"], wanted.logits[-1:])


def test_a_trace_names_an_adapter_of_the_server_s(ranks: Ranks, engines: Any) -> None:
    with own_engine(engines, "llama", **LORA) as here:
        wanted = read(here, lora_request=LoRARequest("one", 1, ranks.adapter))
    values, without = read(ranks.model, lora_request="one"), read(ranks.model)
    for name, value in values.items():
        assert_close(value, wanted[name], name, bound=5e-5)
        assert (value - without[name]).abs().max() > 0.1
    with pytest.raises(insitu.ArgumentError, match="no adapter 'two'"):
        read(ranks.model, lora_request="two")


def test_a_form_beside_a_request_of_an_adapter_reads_its_values(ranks: Ranks) -> None:
    client = openai.OpenAI(base_url=f"{ranks.url}/v1", api_key="none", max_retries=0)
    form = {"actions": [{"do": "read", "at": "resid_post[2]", "as": "hidden", "positions": "all"}]}
    found = {}
    for name in ("one", "tiny"):
        answer = client.completions.create(model=name, prompt=PROMPT, extra_body={"insitu": form}, **GREEDY)
        found[name] = answer.choices[0].insitu["saves"]["hidden"]  # type: ignore[attr-defined]
    for name, adapter in (("one", "one"), ("tiny", None)):
        wanted = read(ranks.model, lora_request=adapter)["hidden"]
        assert_close(wanted.new_tensor(found[name]), wanted, name)


def test_the_walkthrough_prints_the_same_answers_at_a_server(tmp_path: Path) -> None:
    server = Server(folder=insitu.demo_model())
    try:
        there = walked(tmp_path, "--url", server.url)
    finally:
        server.close()
    here = walked(tmp_path)
    assert there == here
    text = "\n".join(there)
    assert "' Paris' becomes" in text
    assert "0 requests left in the engine." in text


def walked(out: Path, *arguments: str) -> list[str]:
    """What the walkthrough prints from the first value on, without how long it took."""
    command = [sys.executable, "-m", "insitu.walkthrough", "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    return [line.partition(" s; ")[2] or line for line in lines[lines.index("Reading values inside the model") :]]
