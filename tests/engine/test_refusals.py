"""Every refusal says what it is about, what was wanted, what was got, and shows the user's own line.

Only those that no other test provokes are here. The line to be blamed ends in `# here`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import insitu
from insitu.block import InsituError
from tests.engine.helpers import own_engine

PROMPT = [5, 6, 7, 8]
GREEDY = {"temperature": 0.0, "max_tokens": 1}
LONGER = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}

Cases = dict[Callable[[Any], Any], tuple[type[BaseException], str]]


@pytest.fixture(scope="module", autouse=True)
def engine_lives(request: pytest.FixtureRequest):
    yield
    model = request.getfixturevalue("engines").get("llama")
    with model.trace(PROMPT, **GREEDY):
        logits = model.logits.save()
    assert torch.isfinite(logits).all()
    assert model.in_flight() == 0


def assert_blames_here(error: BaseException) -> None:
    """That the last line of the user's is the one to be blamed, and none of the library's is shown."""
    shown = traceback.extract_tb(error.__traceback__)
    assert [entry.filename for entry in shown if "insitu/src" in entry.filename or "/insitu/" in entry.filename] == []
    assert shown[-1].filename == __file__
    assert (shown[-1].line or "").endswith("# here"), shown[-1].line


def assert_refused(block: Callable[[Any], Any], model: Any, kind: type[BaseException], text: str) -> None:
    with pytest.raises(kind) as caught:
        block(model)
    assert type(caught.value) is kind
    assert str(caught.value) == text
    assert_blames_here(caught.value)


# Traces and invokes.


def no_invoke(model: Any) -> None:
    with model.trace(**GREEDY):  # here
        pass


def invoke_that_is_never_entered(model: Any) -> None:
    with model.trace(**GREEDY) as tracer:  # here
        with tracer.invoke(PROMPT):
            pass
        tracer.invoke(PROMPT)


def invoke_in_an_invoke(model: Any) -> None:
    with model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPT):
            model.resid_post[0]
            with tracer.invoke(PROMPT):  # here
                pass


def invoke_entered_twice(model: Any) -> None:
    with model.trace(**GREEDY) as tracer:
        one = tracer.invoke(PROMPT)
        with one:
            first = model.logits.save()
        with one:  # here
            second = model.logits.save()


def invoke_beside_a_prompt(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY) as tracer:
        with tracer.invoke(PROMPT):  # here
            pass


def invoke_after_the_trace(model: Any) -> None:
    with model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPT):
            pass
    with tracer.invoke(PROMPT):  # here
        pass


def invoke_after_a_trace_that_failed(model: Any) -> None:
    try:
        with model.trace(**GREEDY) as tracer:
            raise KeyError
    except KeyError:
        pass
    with tracer.invoke(PROMPT):  # here
        pass


def trace_in_a_block(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        with model.trace(PROMPT, **GREEDY):  # here
            pass


def trace_made_before_and_entered_in_a_block(model: Any) -> None:
    other = model.trace(PROMPT, **GREEDY)
    with model.trace(PROMPT, **GREEDY):
        model.resid_post[0]
        with other:  # here
            pass


def two_traces_on_one_line(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY), model.trace(PROMPT, **GREEDY):  # here
        pass


def function_run_in_a_block(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        model.run(lambda tracer: None, PROMPT)  # here


def closing_in_a_block(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        model.logits
        model.close()  # here


def name_between_invokes(model: Any) -> None:
    with model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPT):
            hidden = model.logits.save()
        print(hidden)  # here


def name_that_no_invoke_binds(model: Any) -> None:
    with model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPT):
            hidden = model.logits.save()
        print(hiden)  # noqa: F821  # here


NO_PROMPT = (
    "invokes are opened in the body of a trace without a prompt: `with model.trace() as tracer:`, then "
    "`with tracer.invoke(prompt):`"
)
TRACE_IN_BLOCK = "a trace can't be opened inside a block: open it after the one before has ended"
OF_TRACES: Cases = {
    no_invoke: (
        insitu.ArgumentError,
        "this trace has no prompt and opened no invoke: write `model.trace(prompt)`, or open "
        "`with tracer.invoke(prompt):` in it",
    ),
    invoke_that_is_never_entered: (
        insitu.ArgumentError,
        "invoke 1 of this trace was made and never entered, so its prompt would not run: write "
        "`with tracer.invoke(prompt):`, with a block (`pass` is one)",
    ),
    invoke_in_an_invoke: (
        insitu.ArgumentError,
        "an invoke can't be opened inside a block: open each after the one before has ended",
    ),
    invoke_entered_twice: (
        insitu.ArgumentError,
        "this invoke was entered before; one is one request, so call `tracer.invoke(prompt)` again for another",
    ),
    invoke_beside_a_prompt: (insitu.ArgumentError, NO_PROMPT),
    invoke_after_the_trace: (insitu.ArgumentError, NO_PROMPT),
    invoke_after_a_trace_that_failed: (insitu.ArgumentError, NO_PROMPT),
    trace_in_a_block: (insitu.ArgumentError, TRACE_IN_BLOCK),
    trace_made_before_and_entered_in_a_block: (insitu.ArgumentError, TRACE_IN_BLOCK),
    two_traces_on_one_line: (insitu.ArgumentError, TRACE_IN_BLOCK),
    function_run_in_a_block: (insitu.ArgumentError, TRACE_IN_BLOCK),
    closing_in_a_block: (
        insitu.EngineError,
        "the model can't be closed in a block that it runs: close it after the `with`",
    ),
    name_between_invokes: (
        NameError,
        "name 'hidden' is not defined: an invoke binds it, and invokes run after the body around them has ended. "
        "Read `hidden` in a later invoke, or after the trace",
    ),
    name_that_no_invoke_binds: (NameError, "name 'hiden' is not defined"),
}


@pytest.mark.parametrize("block", OF_TRACES, ids=lambda block: block.__name__)
def test_traces_and_invokes(llama: Any, block: Callable[[Any], Any]) -> None:
    assert_refused(block, llama, *OF_TRACES[block])


def test_a_failed_body_runs_no_invoke(llama: Any) -> None:
    before = llama.stats()
    for block in (invoke_that_is_never_entered, invoke_entered_twice, name_between_invokes):
        with pytest.raises((insitu.ArgumentError, NameError)):
            block(llama)
    assert llama.stats() == before


def test_closing_between_invokes_is_told_when_they_are_to_run(engines: Any) -> None:
    with own_engine(engines, "llama") as model, pytest.raises(insitu.EngineError) as caught:
        with model.trace(**GREEDY) as tracer:  # here
            with tracer.invoke(PROMPT):
                pass
            model.close()
    assert str(caught.value) == "the model was closed before this trace ran; make a new one"
    assert_blames_here(caught.value)


# Settings.

SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "hot"}, "`temperature` takes a number; got str 'hot'"),
    ({"temperature": None}, "`temperature` takes a number; got NoneType None"),
    ({"max_tokens": 1.5}, "`max_tokens` takes an integer or None; got float 1.5"),
    ({"max_tokens": True}, "`max_tokens` takes an integer or None; got bool True"),
    ({"max_new_tokens": "3"}, "`max_new_tokens` takes an integer or None; got str '3'"),
    ({"stop": 3}, "`stop` takes a text, a list of texts or None; got int 3"),
    ({"stop": ["a", 3]}, "`stop` takes a text, a list of texts or None; got list ['a', 3]"),
    ({"n": "2"}, "`n` takes an integer; got str '2'"),
    ({"seed": "a"}, "`seed` takes an integer or None; got str 'a'"),
    ({"seed": 2**64}, "`seed` takes an integer or None; got int 18446744073709551616"),
    ({"top_p": [0.5]}, "`top_p` takes a number; got list [0.5]"),
    ({"logprobs": "x"}, "`logprobs` takes an integer or None; got str 'x'"),
    ({"ignore_eos": "no"}, "`ignore_eos` takes True or False; got str 'no'"),
    ({"stop_token_ids": [10**6], "min_tokens": 1}, "stop_token_ids: 1000000 is not in the vocabulary of 491"),
    ({"stop_token_ids": 5}, "`stop_token_ids` takes a list of integers or None; got int 5"),
    ({"logit_bias": {"a": 1.0}}, "`logit_bias` takes a dict of numbers by token id or None; got dict {'a': 1.0}"),
    ({"bad_words": "text"}, "`bad_words` takes a list of texts or None; got str 'text'"),
    ({"extra_args": 3}, "`extra_args` takes a dict by name or None; got int 3"),
    ({"structured_outputs": 3}, "`structured_outputs` takes StructuredOutputsParams or None; got int 3"),
    ({"lora_request": "path"}, "`lora_request` takes LoRARequest or None; got str 'path'"),
    ({"edits": ["a"]}, "edits: there is no installed edit `a`"),
    ({"edits": "a"}, "`edits` takes a list of texts or None; got str 'a'"),
]


def in_a_trace(model: Any, settings: dict[str, Any]) -> None:
    model.trace(PROMPT, **settings)  # here


def in_a_trace_without_prompt(model: Any, settings: dict[str, Any]) -> None:
    model.trace(**settings)  # here


def in_an_invoke(model: Any, settings: dict[str, Any]) -> None:
    with model.trace() as tracer:
        with tracer.invoke(PROMPT, **settings):  # here
            pass


def in_a_run(model: Any, settings: dict[str, Any]) -> None:
    model.run(lambda tracer: None, PROMPT, **settings)  # here


@pytest.mark.parametrize("call", [in_a_trace, in_a_trace_without_prompt, in_an_invoke, in_a_run])
@pytest.mark.parametrize(("settings", "text"), SETTINGS, ids=lambda case: str(case)[:30])
def test_settings_of_the_wrong_type(llama: Any, call: Any, settings: dict[str, Any], text: str) -> None:
    assert_refused(lambda model: call(model, settings), llama, insitu.ArgumentError, text)


def test_settings_that_were_checked_before_are_no_others(llama: Any) -> None:
    for _ in range(2):
        with llama.trace(PROMPT, temperature=0.0, max_tokens=1) as tracer:
            steps = list(tracer.iter[:]).save()
        assert steps == [0]
        for wrong in (True, 1.5, "1"):  # the first is equal to what it was
            with pytest.raises(TypeError, match="`max_tokens` takes an integer or None"):
                llama.trace(PROMPT, temperature=0.0, max_tokens=wrong)
        with llama.trace(PROMPT, temperature=0.0, max_tokens=2, ignore_eos=True) as tracer:
            steps = list(tracer.iter[:]).save()
        assert steps == [0, 1]


def test_values_that_vllm_refuses_are_shown_at_the_users_line(llama: Any) -> None:
    with pytest.raises(Exception, match="max_tokens must be at least 1, got 0") as caught:
        llama.trace(PROMPT, max_tokens=0)  # here
    assert_blames_here(caught.value)


def test_numbers_of_torch_and_numpy_are_settings(llama: Any) -> None:
    import numpy as np

    settings = {"temperature": np.float32(0), "max_tokens": torch.tensor(2), "stop_token_ids": np.array([488, 489])}
    with llama.trace(PROMPT, ignore_eos=True, logprobs=True, **settings) as tracer:
        result = tracer.result.save()
    assert len(result.outputs[0].token_ids) == 2
    assert len(result.outputs[0].logprobs) == 2


# Prompts.

WHAT = "a prompt is a string, token ids, a tokenizer's output, a prompt dictionary or a chat; got"
HALF = (
    "the prompt's character 1 is U+D800, half of a surrogate pair, which no tokenizer takes: decode the text anew, or "
    "replace it: text.encode(errors='replace').decode()"
)
KEYS = "a prompt dictionary has `prompt`, `prompt_token_ids` or `input_ids`; this one has"
MESSAGE = "each message of a chat has 'role' and 'content', such as {'role': 'user', 'content': 'Hello'}; one has"
EMPTY = "the prompt is empty: give at least one token"
PROMPTS: list[tuple[Any, str]] = [
    ("", EMPTY),
    ([], EMPTY),
    ("a\ud800b", HALF),
    ({"prompt": "a\ud800"}, HALF),
    ([{"role": "user", "content": "a\ud800"}], HALF),
    (None, f"{WHAT} NoneType"),
    (3, f"{WHAT} int"),
    ([1.5], f"{WHAT} list"),
    (["Hello"], "got a list of one text: give the text itself"),
    ([True], f"{WHAT} list"),
    ({"prompt_token_ids": "abc"}, f"{WHAT} str"),
    ({}, f"{KEYS} nothing"),
    ({1: 2, "x": 3}, f"{KEYS} 1, x"),
    ({"prompt": 3}, f"{KEYS} prompt"),
    ({"input_ids": [1, 2], "attention_mask": [1]}, "attention_mask has 1 entries for 2 token ids"),
    ([{"role": "user"}], f"{MESSAGE} role"),
    ({"role": "user"}, f"{MESSAGE} role"),
    ([{"content": "Hello"}], f"{MESSAGE} content"),
    ([-1], "token id -1 is not in the vocabulary of 491"),
    ([10**9], "token id 1000000000 is not in the vocabulary of 491"),
]


@pytest.mark.parametrize(("prompt", "text"), PROMPTS, ids=lambda case: ascii(case)[:30])
def test_prompts(llama: Any, prompt: Any, text: str) -> None:
    def block(model: Any) -> None:
        model.trace(prompt, **GREEDY)  # here

    assert_refused(block, llama, insitu.PromptError, text)


# Values.


def storage_taken_away(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        out = model.model.layers[0].mlp.output
        out.untyped_storage().resize_(0)
        model.logits  # here


def tensor_without_storage_written(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        new = torch.zeros(4, 128)
        new.untyped_storage().resize_(8)
        model.model.layers[0].mlp.output = new  # here


def stream_without_storage_written(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        new = torch.zeros(4, 128)
        new.untyped_storage().resize_(8)
        model.resid_post[0] = new  # here


def list_that_holds_itself_written(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        new: list[Any] = [1]
        new.append(new)
        model.model.layers[0].mlp.output = new  # here


def deep_list_read(model: Any) -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with model.trace(PROMPT, **GREEDY):  # here
        size = len(deep).save()


def module_that_is_assigned(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        model.model.layers[0].mlp.gate_up_proj = 1  # here


def layer_that_is_not_there(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        model.resid_post[4]  # here


def module_that_is_not_there_from_the_end(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        model.model.layers[-5].output  # here


def slice_of_layers(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        model.resid_post[1:3]  # here


def slice_of_layers_written(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        model.resid_post[::2] = 0  # here


def layer_by_its_name(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        model.q["1"]  # here


def index_forgotten(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        hidden = model.q.save()  # here


def index_forgotten_in_a_helper(model: Any) -> None:
    def keep(value: Any) -> Any:
        return insitu.save(value)  # here

    with model.trace(PROMPT, **GREEDY):
        hidden = keep(model.resid_post)


def module_saved(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        layer = model.model.layers[1].save()  # here


def operation_saved(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        found = model.model.layers[1].source.self_self_attn_0.save()  # here


def ids_out_of_the_vocabulary(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY) as tracer:
        model.samples[:] = 10**7
        tracer.result  # here


def ids_out_of_the_vocabulary_at_the_end(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):  # here
        model.samples = torch.tensor([-5])


def loop_after_a_break(model: Any) -> None:
    with model.trace(PROMPT, **LONGER) as tracer:
        for step in tracer.iter[:]:
            if step == 2:
                break
        for step in tracer.iter[:]:  # here
            pass


def loop_in_a_loop(model: Any) -> None:
    with model.trace(PROMPT, **LONGER) as tracer:
        for step in tracer.iter[:]:  # here
            for inner in tracer.iter[step:]:
                pass


def loop_after_stop(model: Any) -> None:
    with model.trace(PROMPT, **LONGER) as tracer:
        for step in tracer.iter[:]:
            if step == 1:
                tracer.stop()
        for step in tracer.iter[:]:  # here
            pass


def step_in_a_block(model: Any) -> None:
    engine = model.vllm_entrypoint.llm_engine
    with model.trace(PROMPT, **GREEDY):
        engine.step()  # here


def steps_backwards(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY) as tracer:
        for step in tracer.iter[::-1]:  # here
            pass


def steps_out_of_order(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY) as tracer:
        for step in tracer.iter[[2, 1]]:  # here
            pass


def bytes_of(tensor: str, needed: int, there: int = 0) -> str:
    return (
        f"{tensor} (4, 128) has {there} bytes of memory of the {needed} that it needs: its storage was resized. Assign "
        f"another tensor instead, or cut rows off with an index"
    )


ENGINE_IN_BLOCK = (
    "an engine can't be run from inside a block, which waits for a step of it: call `generate` and the like before the "
    "`with` or after it, or give each prompt an invoke of its own"
)
MLP = "model.layers.0.mlp.output"
OF_VALUES: Cases = {
    storage_taken_away: (insitu.WriteError, bytes_of(MLP, 2048)),
    tensor_without_storage_written: (insitu.WriteError, bytes_of(f"what was written to {MLP}", 2048, 8)),
    stream_without_storage_written: (insitu.WriteError, bytes_of("what was written to model.resid_post[0]", 2048, 8)),
    list_that_holds_itself_written: (
        insitu.WriteError,
        f"{MLP} takes shape (4, 128) torch.float32; got list of 2 (int 1, list of 2 (int 1, list of 2 (int 1, "
        f"list of 2 (...))))",
    ),
    deep_list_read: (
        insitu.ArgumentError,
        "`deep`, which the block reads, is nested too deeply to be copied for it: hand the block the part that it "
        "needs, by a name of its own, or keep it as an attribute of an object",
    ),
    module_that_is_assigned: (
        AttributeError,
        "`model.layers.0.mlp.gate_up_proj` can't be assigned: a block writes to places, such as "
        "`model.layers.0.mlp.gate_up_proj.output = value`",
    ),
    layer_that_is_not_there: (IndexError, "model.resid_post has 4 layers, 0 to 3; got 4"),
    module_that_is_not_there_from_the_end: (IndexError, "`model.layers` has 4 modules, 0 to 3; got -5"),
    slice_of_layers: (
        insitu.ArgumentError,
        "`model.resid_post[i]` is one layer's, i its number; got the slice [1:3]. For several, in order: "
        "`[model.resid_post[i] for i in range(1, 3)]`",
    ),
    slice_of_layers_written: (
        insitu.ArgumentError,
        "`model.resid_post[i]` is one layer's, i its number; got the slice [::2]. For several, in order: "
        "`[model.resid_post[i] for i in range(0, 4, 2)]`",
    ),
    layer_by_its_name: (
        insitu.ArgumentError,
        "`model.q[i]` is one layer's, i its number; got str '1'. For several, in order: "
        "`[model.q[i] for i in range(...)]`",
    ),
    index_forgotten: (
        insitu.ArgumentError,
        "an index is missing: `model.q[i].save()` saves what it is at layer i",
    ),
    index_forgotten_in_a_helper: (
        insitu.ArgumentError,
        "an index is missing: `model.resid_post[i].save()` saves what it is at layer i",
    ),
    module_saved: (
        insitu.ArgumentError,
        "`model.layers.1` is a module or operation and no value: save `model.layers.1.output` or "
        "`model.layers.1.input`",
    ),
    operation_saved: (
        insitu.ArgumentError,
        "`model.layers.1.source.self_self_attn_0` is a module or operation and no value: save "
        "`model.layers.1.source.self_self_attn_0.output` or `model.layers.1.source.self_self_attn_0.input`",
    ),
    ids_out_of_the_vocabulary: (insitu.WriteError, "model.samples takes token ids, 0 to 490; got 10000000"),
    ids_out_of_the_vocabulary_at_the_end: (insitu.WriteError, "model.samples takes token ids, 0 to 490; got -5"),
    loop_after_a_break: (
        insitu.OutOfOrderError,
        "step 0 has gone by: the block is in step 2. No step comes twice: do all that it is for in one loop, or go on "
        "with `tracer.iter[3:]`",
    ),
    loop_in_a_loop: (
        insitu.OutOfOrderError,
        "step 1 has gone by: the block is in step 4. No step comes twice: do all that it is for in one loop",
    ),
    loop_after_stop: (
        insitu.OutOfOrderError,
        "step 0 has gone by: the block is in step 2. No step comes twice: do all that it is for in one loop",
    ),
    step_in_a_block: (insitu.ArgumentError, ENGINE_IN_BLOCK),
    steps_backwards: (
        insitu.ArgumentError,
        "steps go forwards: the step of the slice must be at least 1; got -1",
    ),
    steps_out_of_order: (insitu.ArgumentError, "steps go forwards: give the list in rising order; got [2, 1]"),
}


@pytest.mark.in_process  # in another process the engine is not there, and its methods can't travel
@pytest.mark.parametrize("form", ["generate", "chat", "enqueue"])
def test_the_engine_can_t_be_run_in_a_block(llama: Any, form: str) -> None:
    given = [[{"role": "user", "content": "Hello"}]] if form == "chat" else [{"prompt_token_ids": PROMPT}] * 2
    settings = {"chat_template": "{{ messages[0].content }}"} if form == "chat" else {}
    call = getattr(llama.vllm_entrypoint, form)
    with pytest.raises(insitu.ArgumentError) as caught:
        with llama.trace(PROMPT, **GREEDY):
            llama.resid_post[0]
            call(given, use_tqdm=False, **settings)
    assert str(caught.value) == ENGINE_IN_BLOCK
    assert not llama.vllm_entrypoint.llm_engine.has_unfinished_requests()
    (output,) = llama.vllm_entrypoint.generate([{"prompt_token_ids": PROMPT}], use_tqdm=False)
    assert output.finished


@pytest.mark.parametrize(
    "block",
    [pytest.param(each, marks=[pytest.mark.in_process] * (each is step_in_a_block)) for each in OF_VALUES],
    ids=lambda block: block.__name__,
)
def test_values_and_places(llama: Any, block: Callable[[Any], Any]) -> None:
    assert_refused(block, llama, *OF_VALUES[block])


@pytest.mark.in_process  # pickle does not go as deep
def test_lists_that_hold_themselves_and_deep_ones_come_home(llama: Any) -> None:
    with llama.trace(PROMPT, **GREEDY):
        rows = llama.resid_post[0]
        ring: list[Any] = [rows[-1], {"rows": rows[-1:]}, rows]
        ring.append((ring, rows))
        ring.save()
        deep: Any = rows
        for _ in range(5000):
            deep = [deep]
        deep.save()
        same = rows.save()
    assert ring[3][0] is ring
    assert ring[2] is ring[3][1] is same
    assert ring[0].untyped_storage().nbytes() == 128 * 4
    assert torch.equal(ring[1]["rows"][0], same[-1])
    while isinstance(deep, list):
        (deep,) = deep
    assert torch.equal(deep, same)


@pytest.mark.in_process
def test_a_deep_list_of_slices_is_refused_by_name(llama: Any) -> None:
    with pytest.raises(insitu.ArgumentError) as caught:
        with llama.trace(PROMPT, **GREEDY):  # here
            deep: Any = llama.resid_post[0][-1]
            for _ in range(5000):
                deep = [deep]
            deep.save()
    assert str(caught.value) == (
        "`deep` is nested too deeply to be brought home: keep its tensors in a flat list or dict"
    )
    assert_blames_here(caught.value)


# What this version does not have.

ABSENT: list[tuple[Callable[[Any], Any], type[InsituError], str]] = [
    (
        lambda model: model.serve(),  # here
        insitu.UnknownModuleError,
        "`model.serve` is not in this version, and no module: `insitu serve MODEL` starts a server, and "
        "`model.trace(..., serve=url)` runs a trace at one",
    ),
    (
        lambda model: insitu.VLLM("x", engine="ray"),  # here
        insitu.ArgumentError,
        "engine='ray': it is 'in-process', 'workers', or left out, and then as the devices need. The arguments of "
        "vllm.LLM are given here by name, and the LLM is in model.vllm_entrypoint",
    ),
    (
        lambda model: len(insitu.VLLM("x").model.layers),  # here
        insitu.OutsideTraceError,
        "len(model.layers) is known once the engine runs: call model.dispatch() first",
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), ABSENT, ids=lambda case: case[:20] if isinstance(case, str) else "")
def test_what_is_not_there(llama: Any, call: Callable[[Any], Any], kind: type[BaseException], text: str) -> None:
    with pytest.raises(kind) as caught:
        call(llama)
    assert type(caught.value) is kind
    assert str(caught.value) == text


def test_names_of_later_versions_are_no_attributes(llama: Any) -> None:
    assert not hasattr(llama, "serve")


# What an engine is built of.


def test_a_prompt_of_embeddings_has_no_tokens(engines: Any) -> None:
    with own_engine(engines, "llama", enable_prompt_embeds=True) as model:
        for read in (lambda tracer: tracer.tokens, lambda tracer: tracer.positions_of("x")):
            with pytest.raises(insitu.PromptError, match=r"^the prompt was given by embeddings, so that it has no t"):
                model.run(read, {"prompt_embeds": torch.ones(3, 128)}, max_tokens=1)


def test_an_engine_without_a_tokenizer_takes_ids_alone(engines: Any) -> None:
    with own_engine(engines, "llama", skip_tokenizer_init=True) as model:
        with pytest.raises(insitu.EngineError) as caught:
            model.trace("text")  # here
        assert str(caught.value) == "this engine was built with skip_tokenizer_init: give prompts as token ids"
        assert_blames_here(caught.value)
        assert model.run(lambda tracer: model.logits, PROMPT, detokenize=False, **GREEDY).shape[0] == 1


def test_a_model_that_makes_no_text_is_refused(engines: Any) -> None:
    with pytest.raises(insitu.EngineError) as caught:
        with own_engine(engines, "llama", runner="pooling"):
            pass
    assert str(caught.value).endswith("is a pooling model; insitu traces models that generate text")


def test_a_worker_that_insitu_is_not_attached_to() -> None:
    from insitu.engine.worker.worker import InsituWorker

    with pytest.raises(insitu.EngineError, match=r"^insitu is not attached to this worker$"):
        InsituWorker().insitu_in_flight()
