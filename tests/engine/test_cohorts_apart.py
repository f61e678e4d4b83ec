"""Operations that round by the shape of what they get: a cohort does them to each request's rows by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from insitu import VLLM
from tests.engine.cohorts import GREEDY, PROMPTS, alone_and_together, counted, same

pytestmark = pytest.mark.usefixtures("several_threads")

WIDTH = 128
VECTOR = torch.linspace(-1, 1, WIDTH)
MATRIX = torch.stack([VECTOR, VECTOR.flip(0), VECTOR**2], 1)
NAMES = {"torch": torch, "VECTOR": VECTOR, "MATRIX": MATRIX}


def block_of(model: VLLM, *lines: str) -> Callable[[Any], Any]:
    """A function of these lines, in which ``x`` is a stream's rows."""
    names = {"model": model, **NAMES}
    exec("\n    ".join(["def block(tracer):", "x = model.resid_post[1]", *lines]), names)
    return names["block"]


@pytest.fixture(scope="module")
def learnt(llama: VLLM) -> VLLM:
    places = lambda tracer: [llama.resid_post[1], llama.q[2], llama.resid_post[2], llama.logits]  # noqa: E731
    llama.run(places, PROMPTS[:1], **GREEDY)
    return llama


@pytest.mark.parametrize(
    "text",
    [
        "x.mean(0)", "x.mean()", "x.mean(0, dtype=torch.float64)", "x - x.mean(-1, keepdim=True)", "x - x.mean(0)",
        "x[1:].sum(0)", "x[5:].sum(0)", "x.norm(dim=-1)", "x[-1].norm()", "x.norm(1, -1)", "x.softmax(-1)",
        "x.softmax(dim=0)", "x @ MATRIX", "x @ VECTOR", "x[-1] @ VECTOR", "x[-1] @ MATRIX", "x[1:] @ MATRIX",
        "(x @ MATRIX - 0.5).relu()", "x.argmax(-1)", "x.argmax()", "x.amin(0)", "(x @ MATRIX).amax(0)",
        "x[..., None] * 2", "x.sum(-1)[:, None]", "x - (x @ VECTOR).unsqueeze(-1) * VECTOR", "x.bfloat16()",
        "x + VECTOR * x.norm(dim=-1, keepdim=True) / VECTOR.norm()", "x.abs().sqrt().sum(-1)",
        "[x.mean(0) + x[-1], (x @ VECTOR).sigmoid()]", "torch.softmax(x, -1)", "torch.relu(x).sum(dim=0)",
        "torch.outer(x @ VECTOR, VECTOR)", "torch.matmul(x, MATRIX)", "x @ x.mean(0)", "x[-1] @ x.mean(0)",
        "torch.outer(x[1:] @ x.mean(0), x[-1])",
    ],
)  # fmt: skip
def test_reads(learnt: VLLM, text: str) -> None:
    block = block_of(learnt, f"return {text}")
    with counted(learnt) as counts:
        alone, together = alone_and_together(learnt, lambda: learnt.run(block, PROMPTS, **GREEDY))
    assert counts == [len(PROMPTS), 2 * len(PROMPTS)]
    hidden = learnt.run(lambda tracer: learnt.resid_post[1], PROMPTS, **GREEDY)
    expected = [eval(text, {"x": rows, **NAMES}) for rows in hidden]
    assert same(alone, expected)
    assert same(together, expected)


@pytest.mark.parametrize(
    "line",
    [
        "x -= (x @ VECTOR)[:, None] * VECTOR", "x[:] -= x.mean(0)", "x[-1] += 3 * x[-1].sigmoid()",
        "x[1:] *= x[1:].mean(-1, keepdim=True)", "x -= torch.outer(x @ VECTOR, VECTOR)",
        "x[:] += VECTOR * x.norm(dim=-1, keepdim=True) / VECTOR.norm()",
    ],
)  # fmt: skip
def test_edits(learnt: VLLM, line: str) -> None:
    block = block_of(learnt, line, "return [model.resid_post[2], model.logits]")
    with counted(learnt) as counts:
        alone, together = alone_and_together(learnt, lambda: learnt.run(block, PROMPTS, **GREEDY))
    assert counts == [len(PROMPTS), 2 * len(PROMPTS)]
    assert same(alone, together)
    plain = learnt.run(lambda tracer: learnt.logits, PROMPTS, **GREEDY)
    assert not any(same(edited[1], logits) for edited, logits in zip(together, plain, strict=True))


def test_at_each_step_and_of_heads_and_logits(learnt: VLLM) -> None:
    sampling = {**GREEDY, "max_tokens": 4, "ignore_eos": True}

    def block(tracer: Any) -> Any:
        found = []
        for _ in tracer.iter[:]:
            found.append(learnt.q[2].norm(dim=-1))
            found.append(learnt.logits.softmax(-1).argmax(-1))
        return found

    with counted(learnt) as counts:
        alone, together = alone_and_together(learnt, lambda: learnt.run(block, PROMPTS, **sampling))
    assert counts == [len(PROMPTS), 2 * len(PROMPTS)]
    assert same(alone, together)
    assert [each.shape for each in together[0]][:2] == [(len(PROMPTS[0]), 4), (1,)]


@pytest.mark.parametrize(
    "line",
    [
        "return x.mean((0, 1))", "return x.mean(0, keepdim=True)", "return x.std(0)", "return x.unsqueeze(0)",
        "return x[2:].amax(0)", "return x.topk(2)", "return VECTOR @ x[-1]",
        "return torch.outer(VECTOR, x @ VECTOR)",
        "return x / x[-1].norm()", "return x[:, None]", "return x[::2].mean()", "return x[::2] @ VECTOR",
        "return torch.stack([x, x])", "return torch.relu(VECTOR) + x", "model.resid_post[1] = x.softmax(-1)",
    ],
)  # fmt: skip
def test_other_forms_run_alone(learnt: VLLM, line: str) -> None:
    block = block_of(learnt, line)
    with counted(learnt) as counts:
        alone, together = alone_and_together(learnt, lambda: learnt.run(block, PROMPTS, **GREEDY))
    assert counts == [0, 3 * len(PROMPTS)]
    assert not isinstance(alone, Exception)
    assert str(alone) == str(together)


@pytest.mark.parametrize("line", ["return x @ VECTOR[:5]", "return x.norm('wrong')", "return x.mean(7)"])
def test_each_request_gets_its_own_error(learnt: VLLM, line: str) -> None:
    block = block_of(learnt, line)
    alone, together = alone_and_together(learnt, lambda: learnt.run(block, PROMPTS, **GREEDY))
    assert len(alone.exceptions) == len(PROMPTS)
    assert same(alone, together)
