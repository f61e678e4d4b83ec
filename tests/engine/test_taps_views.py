"""What a block holds of one memory at a tap, under several names: what it changes under one shows under the others, as
where it runs by eager steps; and arguments that only torch knows."""

from __future__ import annotations

import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from insitu import VLLM
from tests.engine.cohorts import PROMPTS, alone_and_together, same
from tests.engine.taps import assert_same, recorded
from tests.engine.test_cohorts_steps import GREEDY, WIDTH

pytestmark = [pytest.mark.slow, pytest.mark.in_process, pytest.mark.usefixtures("several_threads")]

V, W = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(3))
V, W = V / 8, W / 8

Visit = Callable[[VLLM, list[Any]], None]


@pytest.fixture(params=["between pieces", "recorded"])
def model(request: pytest.FixtureRequest, tapped: Any) -> Iterator[Any]:
    with recorded(tapped) if request.param == "recorded" else nullcontext():
        yield tapped


def changes_a_product(model: VLLM, seen: list[Any]) -> None:
    x = model.resid_post[1]
    along = x @ V
    column = along.unsqueeze(-1)
    along *= 2
    x -= column * V


def changes_a_column(model: VLLM, seen: list[Any]) -> None:
    x = model.resid_post[1]
    along = x @ V
    column = along[:, None]
    column += 2
    x -= along[..., None] * V


def changes_what_a_column_is_of(model: VLLM, seen: list[Any]) -> None:
    x = model.resid_post[1]
    column = x.unsqueeze(-1)
    x += V
    seen.append(column)


def edits_a_part_and_the_sum(model: VLLM, seen: list[Any]) -> None:
    hidden = model.model.layers[1].output[0]
    hidden -= (hidden @ V)[:, None] * V
    stream = model.resid_post[1]
    stream += W
    seen.append(hidden)


def edits_the_sum_and_a_part(model: VLLM, seen: list[Any]) -> None:
    stream = model.resid_post[1]
    stream += W
    residual = model.model.layers[1].output[1]
    residual -= (residual @ V)[:, None] * V
    seen.append(stream)


def edits_both_after_reading_both(model: VLLM, seen: list[Any]) -> None:
    hidden = model.model.layers[1].output[0]
    stream = model.resid_post[1]
    hidden += V
    stream += W
    seen.append(stream)
    seen.append(hidden)


def keeps_the_sum_of_before(model: VLLM, seen: list[Any]) -> None:
    stream = model.resid_post[1]
    hidden = model.model.layers[1].output[0]
    hidden += W
    seen.append(stream)


def leaves_what_it_makes_after_an_edit(model: VLLM, seen: list[Any]) -> None:
    x = model.resid_post[1]
    x[:] += V
    seen.append(x[-1] + W)


def names_arguments_as_numpy_does(model: VLLM, seen: list[Any]) -> None:
    x = model.resid_post[1]
    x -= (x * V).sum(axis=-1, keepdims=True) * V


def gives_memory_for_what_comes(model: VLLM, seen: list[Any]) -> None:
    x = model.resid_post[1]
    along = torch.zeros(1)
    torch.sum(x[-1:] * V, -1, out=along)
    x[-1:] -= along[:, None] * V


def names_all_arguments(model: VLLM, seen: list[Any]) -> None:
    x = model.resid_post[1]
    copy = torch.clone(input=x)
    x.copy_(V.expand_as(x), non_blocking=True)
    seen.append(copy)


def changes_a_vector_by_numpy(model: VLLM, seen: list[Any]) -> None:
    numbers = np.ones(WIDTH, np.float32)
    vector = torch.from_numpy(numbers)
    x = model.resid_post[1]
    x += vector
    numbers += 1
    x += vector


VISITS: list[Visit] = [
    changes_a_product, changes_a_column, changes_what_a_column_is_of, edits_a_part_and_the_sum,
    leaves_what_it_makes_after_an_edit,
    edits_the_sum_and_a_part, edits_both_after_reading_both, keeps_the_sum_of_before, names_arguments_as_numpy_does,
    gives_memory_for_what_comes, names_all_arguments, changes_a_vector_by_numpy,
]  # fmt: skip


def at_each_step(model: VLLM, visit: Visit) -> Callable[[Any], Any]:
    def block(tracer: Any) -> Any:
        seen: list[Any] = []
        for _ in tracer.iter[:]:
            visit(model, seen)
            seen.append(model.resid_post[3])
            seen.append(model.logits)
        return seen

    return block


def written_out(model: VLLM, visit: Visit) -> Callable[[Any], Any]:
    """The same with the visit's own text in the loop, as only such blocks run together."""

    body = textwrap.dedent("".join(inspect.getsourcelines(visit)[0][1:]))
    text = "def block(tracer):\n    seen = []\n    for _ in tracer.iter[:]:\n" + textwrap.indent(body, " " * 8)
    text += "        seen.append(model.resid_post[3])\n        seen.append(model.logits)\n    return seen\n"
    file = f"<{visit.__name__}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"model": model, "torch": torch, "np": np, "V": V, "W": W, "WIDTH": WIDTH}
    exec(compile(text, file, "exec"), namespace)
    return namespace["block"]


@pytest.mark.parametrize("visit", VISITS)
@pytest.mark.parametrize("made", [at_each_step, written_out])
def test_values_are_those_of_eager_steps(
    model: VLLM, llama: VLLM, visit: Visit, made: Callable[[VLLM, Visit], Callable[[Any], Any]]
) -> None:
    run = lambda engine: engine.run(made(engine, visit), PROMPTS, ignore_eos=True, **GREEDY)  # noqa: E731
    wanted, packed = alone_and_together(llama, lambda: run(llama))
    assert same(packed, wanted)
    assert_same(run(model), wanted, "the first time")
    alone, together = alone_and_together(model, lambda: run(model))
    for found, what in ((alone, "alone"), (together, "together")):
        assert not isinstance(found, BaseException), found
        assert_same(found, wanted, what)


def test_a_vector_made_in_inference_mode_is_added(model: VLLM, llama: VLLM) -> None:
    with torch.inference_mode():
        vector = V * 2

    def run(engine: VLLM) -> Any:
        def block(tracer: Any) -> Any:
            seen: list[Any] = []
            for _ in tracer.iter[:]:
                engine.resid_post[1][:] += vector
                seen.append(engine.logits)
            return seen

        return engine.run(block, PROMPTS, ignore_eos=True, **GREEDY)

    for _ in range(2):
        assert_same(run(model), run(llama), "of inference mode")
