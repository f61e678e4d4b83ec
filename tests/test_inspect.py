"""Evaluations of Inspect that run on insitu: what is generated, what blocks read and edit, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash

import insitu
from insitu import ArgumentError
from insitu.inspect_ai import InsituAPI
from tests import models

pytestmark = [pytest.mark.in_process, pytest.mark.slow]
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256}
QUESTION = "Answer with one word. What is the capital of France?"


def evaluated(tmp_path: Path, solver: Any = None, **settings: Any) -> Any:
    model = get_model(f"insitu/{insitu.demo_model()}", memoize=False, **settings, **ENGINE)
    task = Task(
        dataset=[Sample(input=QUESTION, target="Paris"), Sample(input="Say hello.", target="Paris")],
        solver=solver or [generate()],
        scorer=includes(),
        config=GenerateConfig(temperature=0.0, max_tokens=12),
    )
    try:
        (log,) = evaluate(task, model=model, log_dir=str(tmp_path), display="none")
    finally:
        model.api.close()
    return log


def test_an_evaluation_reads_beside_every_generation(tmp_path: Path) -> None:
    def block(tracer: Any, model: Any) -> Any:
        return {"last": model.resid_post[5][-1, :4], "tokens": len(tracer.tokens)}

    log = evaluated(tmp_path, block=block)
    assert log.status == "success", log.error
    first, second = log.samples
    assert "Paris" in first.output.completion
    assert [first.scores["includes"].value, second.scores["includes"].value] == ["C", "I"]
    found = first.output.metadata["insitu"]
    with insitu.VLLM(insitu.demo_model(), **ENGINE) as model:
        with model.trace([{"role": "user", "content": QUESTION}], temperature=0.0, max_tokens=1):
            wanted = model.resid_post[5][-1, :4].save()
    assert found["last"] == pytest.approx(wanted.tolist(), abs=1e-3)
    assert found["tokens"] == first.output.usage.input_tokens


def test_an_evaluation_is_steered_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text(
        "def block(tracer, model):\n    for _ in tracer.iter[:]:\n        model.attn_out[23][:] = 0\n"
    )
    log = evaluated(tmp_path, block=f"{tmp_path / 'silent.py'}:block")
    assert log.status == "success", log.error
    plain = evaluated(tmp_path)
    assert plain.samples[0].output.metadata is None
    assert log.samples[0].output.completion != plain.samples[0].output.completion


def test_tools_are_refused_by_name(tmp_path: Path) -> None:
    log = evaluated(tmp_path, solver=[use_tools(bash()), generate()])
    assert log.status == "error"
    assert "runs no tools" in log.error.message


def generated(api: Any, config: GenerateConfig) -> Any:
    async def main() -> Any:
        try:
            return await api.generate([ChatMessageUser(content="the cat sat")], [], "none", config)
        finally:
            await api.aclose()

    return asyncio.run(main())


def test_several_choices_have_what_the_block_returned_for_each() -> None:
    api = InsituAPI(insitu.demo_model(), block=lambda tracer, model: model.logits.shape[-1], **ENGINE)
    found = generated(api, GenerateConfig(num_choices=2, max_tokens=3, temperature=1.0))
    assert len(found.choices) == 2
    assert found.metadata == {"insitu": [49152, 49152]}


@pytest.mark.parametrize(
    ("config", "text"), [({"logprobs": True}, "does not pass logprobs on"), ({"reasoning_effort": "low"}, "reasoning")]
)
def test_settings_that_can_t_be_passed_on(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        generated(InsituAPI(models.tiny("llama"), **ENGINE), GenerateConfig(**config))


def test_a_block_that_is_no_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no such file"):
        InsituAPI("model", block=str(tmp_path / "missing.py:block"))
