"""Blocks that do the same beside many requests are run once for all, and each request gets what it would get alone."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from insitu import VLLM
from tests.engine.cohorts import GREEDY, PROMPTS, alone_and_together, counted, same
from tests.models import LAYERS

pytestmark = pytest.mark.usefixtures("several_threads")

READS = ["model.resid_post[{}]", "model.model.layers[{}].mlp.output", "model.attn_out[{}]", "model.resid_mid[{}]"]
PICKS = ["-1", "0", "1", ":2", "1:", "-2:", "::2", ":", "2:2"]
SUMS = ["{} * 2.0", "{} + v", "v - {}", "{} - 0.5", "1.0 - {}", "-{}", "{} / 3", "{}.clone()", "{} + {}", "w * {}"]
EDITS = ["{}[:] += v", "{}[-1] = 0", "{} *= 1.5", "{}[:1] += v", "{}[0] -= w", "{}[:] = v", "{}[1:] *= 0.5"]
EDITS += ["{0} -= ({0} @ w)[:, None] * w", "{0}[:] -= {0}.mean(0)", "{0}[-1] *= 2 * {0}[-1].sigmoid()"]
APART = ["{}.mean(0)", "{}.sum(-1)", "{}.norm(dim=-1)", "{}.softmax(-1)", "{} @ m", "{}.mean()", "{}.tanh()"]
APART += ["{0} - {0}.mean(-1, keepdim=True)", "{}.argmax(-1)", "{}.sum(0) @ w", "({} @ m).amax(0)", "{}.norm()"]


@st.composite
def programs(draw: st.DrawFn) -> str:
    """The text of a block."""
    lines: list[str] = []
    for layer in sorted(draw(st.sets(st.integers(0, LAYERS - 1), min_size=1, max_size=3))):
        name = f"x{layer}"
        lines.append(f"{name} = {draw(st.sampled_from(READS)).format(layer)}")
        for number in range(draw(st.integers(0, 4))):
            kind = draw(st.sampled_from(["pick", "sum", "apart", "edit", "save"]))
            if kind == "edit":
                lines.append(draw(st.sampled_from(EDITS)).format(name))
                continue
            if kind == "save":
                lines.append(f"{name}.save()")
                continue
            text = f"{name}[{draw(st.sampled_from(PICKS))}]" if kind == "pick" or draw(st.booleans()) else name
            if kind in ("sum", "apart") or draw(st.booleans()):
                form = draw(st.sampled_from(APART if kind == "apart" else SUMS))
                text = form.format(*[f"({text})"] * max(1, form.count("{}")))
            lines.append(f"y{layer}_{number} = ({text}).save()")
    lines.append("last = model.logits[0].save()")
    return "\n".join(lines)


def saved_in(program: str) -> list[str]:
    """The names that a program saves."""
    names = sorted({line.split(" = ")[0] for line in program.splitlines() if ".save()" in line and "=" in line})
    return names + sorted({line.removesuffix(".save()") for line in program.splitlines() if line.startswith("x")})


def trace_of(program: str, names: list[str], trace: Callable[..., Any] = VLLM.trace) -> Callable[..., dict[str, Any]]:
    """A function that traces all prompts with the program as their block."""
    body = "\n".join(f"                {line}" for line in program.splitlines())
    text = (
        "def traced(model, vectors, w, sampling):\n"
        "    m = torch.stack([w, 2 * w, w.flip(0)], 1)\n"
        "    with trace(model, **sampling) as tracer:\n"
        "        for prompt, v in zip(PROMPTS, vectors):\n"
        f"            with tracer.invoke(prompt):\n{body}\n"
        f"    return {{name: value for name, value in locals().items() if name in {names!r}}}\n"
    )
    file = f"<program {abs(hash(text))}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"PROMPTS": PROMPTS, "torch": torch, "trace": trace}
    exec(compile(text, file, "exec"), namespace)
    return namespace["traced"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=programs(), seed=st.integers(0, 9))
@pytest.mark.slow
def test_any_program_leaves_the_same(llama: VLLM, program: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    width = 128
    vectors = [torch.randn(width, generator=generator) for _ in PROMPTS]
    shared = torch.randn(width, generator=generator)
    traced = trace_of(program, saved_in(program))
    with counted(llama) as counts:
        alone, together = alone_and_together(llama, lambda: traced(llama, vectors, shared, GREEDY))
    event(f"together: {counts[0]}, failed: {isinstance(together, BaseException)}")
    assert same(alone, together), program


def read_last(model: VLLM) -> Callable[[Any], Any]:
    return lambda tracer: [model.resid_post[layer][-1] for layer in range(LAYERS)]


def test_a_function_runs_once_for_all(llama: VLLM) -> None:
    llama.run(read_last(llama), PROMPTS[:2], **GREEDY)
    with counted(llama) as counts:
        together = llama.run(read_last(llama), PROMPTS, **GREEDY)
    assert counts == [len(PROMPTS), 0]
    alone = [llama.run(read_last(llama), prompt, **GREEDY) for prompt in PROMPTS]
    assert same(alone, together)


def test_values_are_the_requests_own(llama: VLLM) -> None:
    llama.run(lambda tracer: llama.resid_post[1], PROMPTS[:1], **GREEDY)
    first, *others = llama.run(lambda tracer: llama.resid_post[1], PROMPTS, **GREEDY)
    before = [each.clone() for each in others]
    first.zero_()
    assert same(before, others)
    for each in (first, *others):
        assert each.untyped_storage().nbytes() == each.numel() * each.element_size()
        assert not each.is_inference()


def test_what_has_no_rule_runs_alone_and_only_once(llama: VLLM) -> None:
    seen: list[int] = []

    def block(tracer: Any) -> Any:
        hidden = llama.resid_post[1]
        seen.append(hidden.shape[0])
        return hidden.cumsum(0)

    llama.run(block, PROMPTS, **GREEDY)
    seen.clear()
    with counted(llama) as counts:
        sums = llama.run(block, PROMPTS, **GREEDY)
    assert counts == [0, len(PROMPTS)]
    assert seen == [len(prompt) for prompt in PROMPTS]
    assert same(sums, [llama.run(block, prompt, **GREEDY) for prompt in PROMPTS])


def test_blocks_that_take_turns(llama: VLLM) -> None:
    def work() -> Any:
        with llama.trace(**GREEDY) as tracer:
            for number, prompt in enumerate([*PROMPTS, *PROMPTS]):
                if number % 2:
                    with tracer.invoke(prompt):
                        odd = llama.resid_post[1][-1].save()
                else:
                    with tracer.invoke(prompt):
                        even = (llama.resid_post[0] * 2).save()
        return odd, even

    alone, together = alone_and_together(llama, work)
    assert same(alone, together)


def test_an_index_that_one_prompt_lacks_is_that_ones_error(llama: VLLM) -> None:
    def work() -> Any:
        with llama.trace(**GREEDY) as tracer:
            for prompt in PROMPTS[:4]:
                with tracer.invoke(prompt):
                    row = llama.resid_post[1][3].save()
        return row

    alone, together = alone_and_together(llama, work)
    assert isinstance(together, IndexError)
    assert together.invoke == 1  # type: ignore[attr-defined]
    assert same(alone, together)


def test_each_request_gets_the_error_on_its_line(llama: VLLM) -> None:
    def work() -> Any:
        with llama.trace(**GREEDY) as tracer:
            for prompt in PROMPTS[:4]:
                with tracer.invoke(prompt):
                    wrong = llama.resid_post[2] + three

    three = torch.zeros(3)
    alone, together = alone_and_together(llama, work)
    assert same(alone, together)
    assert [error.invoke for error in together.exceptions] == [0, 1, 2, 3]
    for error in together.exceptions:
        last = error.__traceback__
        while last.tb_next is not None:
            last = last.tb_next
        assert linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno).strip().startswith("wrong = ")


def test_sequences_of_one_request(llama: VLLM) -> None:
    def work() -> Any:
        sampling = {"max_tokens": 2, "n": 5, "seed": 3, "temperature": 1.0}
        return llama.run(lambda tracer: llama.resid_post[1][-1], PROMPTS[0], **sampling)

    alone, together = alone_and_together(llama, work)
    assert same(alone, together)
    assert len(together) == 5


def test_a_list_of_the_callers_is_read(llama: VLLM) -> None:
    layers = [0, 2]
    work = lambda: llama.run(lambda tracer: {layer: llama.mlp_out[layer] for layer in layers}, PROMPTS, **GREEDY)  # noqa: E731
    with counted(llama) as counts:
        alone, together = alone_and_together(llama, work)
    assert same(alone, together)
    assert counts == [len(PROMPTS), 2 * len(PROMPTS)]
