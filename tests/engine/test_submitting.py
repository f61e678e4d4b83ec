"""Many prompts of one trace: tokenised together, submitted once, with a bar."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from typing import Any

import pytest

from benchmarks.calls import profiled
from insitu.block import ArgumentError, PromptError

pytestmark = pytest.mark.in_process

TEXTS = [
    "The Eiffel Tower",
    " is in",
    "<|endoftext|>Paris",
    "naïve café 日本語 🙂",
    "a",
    "line\nline\t",
    *map(str, range(94)),
]
GREEDY = {"temperature": 0.0, "max_tokens": 1}


def encodings(run: Any) -> int:
    """How often a tokenizer of transformers is asked while ``run`` runs."""
    asked = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal asked
        asked += event == "call" and frame.f_code.co_name == "_encode_plus"

    profiled(run, note)
    return asked


def of_a_function(model: Any, prompts: list[Any]) -> list[list[int]]:
    return [list(each.prompt_token_ids) for each in model.run(lambda tracer: tracer.result, prompts, **GREEDY)]


def of_invokes(model: Any, prompts: list[Any]) -> list[list[int]]:
    with model.trace(**GREEDY) as tracer:
        results = [].save()
        for prompt in prompts:
            with tracer.invoke(prompt):
                result = tracer.result
                results.append((tracer, list(result.prompt_token_ids)))
    return [ids for _, ids in results]


def of_generate(model: Any, prompts: list[Any]) -> list[list[int]]:
    return [list(each.prompt_token_ids) for each in model.generate(prompts, **GREEDY)]


WAYS = pytest.mark.parametrize("way", [of_a_function, of_invokes, of_generate])


@WAYS
def test_texts_are_tokenised_in_one_call_as_each_alone(model: Any, way: Any) -> None:
    wanted = [model.tokenizer(text)["input_ids"] for text in TEXTS]
    found: list[Any] = []
    assert encodings(lambda: found.extend(way(model, TEXTS))) == 1
    assert sorted(found) == sorted(wanted) if way is of_invokes else found == wanted


def test_texts_may_stand_among_other_prompts(llama: Any) -> None:
    ids = llama.tokenizer("The Eiffel Tower")["input_ids"]
    prompts = [{"prompt": "The Eiffel Tower"}, "The Eiffel Tower", {"prompt_token_ids": ids}, "The Eiffel Tower"]
    assert of_a_function(llama, prompts) == [ids] * 4


@pytest.mark.parametrize(
    ("text", "said"), [("", "the prompt is empty"), ("a" * 5000, "the prompt has"), ("\ud800", "half of a")]
)
@WAYS
def test_a_text_that_does_not_fit_is_refused_before_anything_runs(llama: Any, way: Any, text: str, said: str) -> None:
    steps = llama.stats().eager_steps
    with pytest.raises(PromptError, match=said):
        way(llama, ["The", text, "The"])
    assert llama.stats().eager_steps == steps
    assert llama.in_flight() == 0


def test_a_refused_invoke_can_be_caught_in_the_body(llama: Any) -> None:
    with llama.trace(**GREEDY) as tracer:
        refused = 0
        for text in ["The", "a" * 5000, "Tower"]:
            try:
                with tracer.invoke(text):
                    logits = llama.logits.save()
            except PromptError:
                refused += 1
        refused.save()
    assert (len(logits), refused) == (2, 1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(model: Any, count: int, stream: io.StringIO, **settings: Any) -> str:
    with redirect_stderr(stream):
        model.run(lambda tracer: None, [[5, 6, 7]] * count, **GREEDY, **settings)
    return stream.getvalue()


def test_a_bar_shows_how_far_a_hundred_requests_have_come(llama: Any) -> None:
    assert "100%" in (bar := shown(llama, 100, Terminal()))
    assert "100/100" in bar


@pytest.mark.parametrize(
    ("count", "stream", "settings"),
    [(99, Terminal, {}), (100, io.StringIO, {}), (100, Terminal, {"progress": False})],
    ids=["few", "no terminal", "not wanted"],
)
def test_no_bar(llama: Any, count: int, stream: Any, settings: dict[str, Any]) -> None:
    assert shown(llama, count, stream(), **settings) == ""


def test_a_bar_is_for_a_whole_trace(llama: Any) -> None:
    with pytest.raises(ArgumentError, match="`progress`: it is for a whole trace"), llama.trace() as tracer:
        with tracer.invoke("The", progress=False):
            pass
