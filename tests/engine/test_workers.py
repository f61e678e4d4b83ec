"""Blocks beside an engine in another process: what travels, what comes home, and what is said of the rest."""

from __future__ import annotations

import functools
import os
import signal
import threading
import traceback
from collections import deque
from typing import Any

import pytest
import torch

import insitu
from tests import models
from tests.engine.helpers import PROMPT, assert_close, hf_stream, ids_of

pytestmark = [pytest.mark.slow, pytest.mark.in_process]

GREEDY = {"temperature": 0.0, "max_tokens": 1}


def worker(**settings: Any) -> Any:
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, **settings}
    return insitu.VLLM(models.tiny("llama"), engine="workers", dispatch=True, **settings)


@pytest.fixture(scope="module")
def model(in_worker: Any) -> Any:
    return in_worker


class Steering:
    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.seen: list[torch.Tensor] = []

    def scaled(self, value: torch.Tensor) -> torch.Tensor:
        self.seen.append(value)
        return value * self.factor


class UnluckyError(Exception):
    pass


def doubled(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def test_values_equal_transformers(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        hidden = model.resid_post[2].save()
    assert_close(hidden, hf_stream("llama", ids_of("llama")).resid_post[2])
    hidden += 1  # an ordinary tensor
    assert not hidden.is_inference()


def test_kinds_of_functions_travel(model: Any) -> None:
    def local(value: torch.Tensor) -> torch.Tensor:
        return value * 2

    torch.manual_seed(0)
    probe = torch.nn.Linear(models.WIDTH, 3)
    steering = Steering(2.0)
    kinds = [lambda value: value * 2, local, functools.partial(torch.mul, other=2), steering.scaled, doubled]
    with model.trace(PROMPT, temperature=0.0, max_tokens=4) as tracer:
        found = [].save()
        for step in tracer.iter[:]:
            hidden = model.model.layers[1].mlp.output
            found.append([hidden, *(kind(hidden) for kind in kinds), probe(hidden), model.logits, model.samples])
    assert len(found) == 4
    for hidden, *scaled, probed, logits, samples in found:
        assert all(torch.equal(each, hidden * 2) for each in scaled)
        assert_close(probed, probe(hidden))
        assert logits.argmax(-1).tolist() == samples.tolist()
    assert len(steering.seen) == 4  # the caller's own object, whatever process changed it
    assert torch.equal(steering.seen[3], found[3][0])


def test_an_object_of_the_users_class_comes_home_as_one(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        made = Steering(model.logits.max().item()).save()
    assert type(made) is Steering


def test_function_form_changes_what_it_closes_over(model: Any) -> None:
    rows: list[Any] = []
    counts = {"blocks": 0}

    def block(tracer: Any) -> None:
        counts["blocks"] += 1
        rows.append(model.samples.item())

    assert model.run(block, [PROMPT, "Water boils at"], **GREEDY) == [None, None]
    assert counts == {"blocks": 2}
    assert len(rows) == 2


OF_THE_MODULE: list[Any] = []


def record(value: Any) -> None:
    OF_THE_MODULE.append(value)


def test_a_list_that_a_helper_appends_to_is_the_block_s_own(model: Any) -> None:
    rows: list[Any] = []

    def keep(value: Any) -> None:
        rows.append(value)

    with model.trace(PROMPT, **GREEDY):
        keep("helper")
        rows.append("block")
        record("helper")
        OF_THE_MODULE.append("block")
        sizes = (len(rows), len(OF_THE_MODULE)).save()
        rows.save()
    assert sizes == (2, 2)
    assert rows == OF_THE_MODULE == ["helper", "block"]


def test_each_completion_has_the_saves_of_its_sequence(model: Any) -> None:
    with model.trace(PROMPT, n=3, temperature=1.0, seed=11, max_tokens=2, ignore_eos=True) as tracer:
        drawn = model.samples.item().save()
        result = tracer.result.save()
    for output in result:
        found = [(completion.token_ids[0], completion.saves) for completion in output.outputs]
        assert found == [(token, {"drawn": token}) for token in drawn]


def test_what_can_t_travel_is_named(model: Any) -> None:
    lock = threading.Lock()
    with pytest.raises(
        insitu.ArgumentError, match=r"`lock` \(lock\) can't travel to the engine's worker process"
    ) as caught:
        with model.trace(PROMPT, **GREEDY):
            with lock:
                model.logits.save()
    assert caught.value.__suppress_context__
    assert model.in_flight() == 0


def test_a_block_that_did_not_get_there_is_sent_again(model: Any) -> None:
    for thing in (threading.Lock(), 2.0):
        try:
            with model.trace(PROMPT, **GREEDY):
                scaled = (model.logits * thing).save()
        except insitu.ArgumentError as error:
            assert "`thing` (lock)" in str(error)
    assert scaled.shape[0] == 1


def test_what_can_t_come_home_is_its_own_request_s_error(model: Any) -> None:
    with pytest.raises(insitu.ArgumentError, match=r"`kept` can't come home from the engine's worker") as caught:
        with model.trace(**GREEDY) as tracer:
            with tracer.invoke(PROMPT):
                kept = [threading.Lock()].save()
            with tracer.invoke(PROMPT):
                logits = model.logits.save()
    assert caught.value.invoke == 0
    assert logits.shape[0] == 1


def test_errors_have_their_class_and_the_user_s_lines(model: Any) -> None:
    def fail() -> None:
        raise UnluckyError("by hand")

    with pytest.raises(UnluckyError, match="by hand") as caught:
        with model.trace(PROMPT, **GREEDY):
            model.logits
            fail()
    lines = traceback.extract_tb(caught.value.__traceback__)
    assert [line.name for line in lines] == [lines[0].name, lines[0].name, "fail"]
    assert {line.filename for line in lines} == {__file__}
    assert [line.line for line in lines][1:] == ["fail()", 'raise UnluckyError("by hand")']


class Tally:
    __slots__ = ("count",)
    runs = 0

    def __init__(self) -> None:
        self.count = 0


def test_what_a_block_changes_in_place_comes_home(model: Any) -> None:
    tally, total, rows = Tally(), torch.zeros(models.WIDTH), deque([1], maxlen=3)
    probe = torch.nn.Linear(models.WIDTH, 2)
    with model.trace(PROMPT, **GREEDY):
        hidden = model.resid_post[1][0].save()
        tally.count += 1
        Tally.runs += 1
        total += hidden
        rows.append(tally)
        probe.weight.data[0] = hidden
    assert (tally.count, Tally.runs) == (1, 1)
    assert torch.equal(total, hidden)
    assert torch.equal(probe.weight[0], hidden)
    assert hidden.abs().sum() > 0


def test_what_can_t_be_brought_home_is_warned_of(model: Any) -> None:
    numbers = iter([1, 2])
    with pytest.warns(insitu.UnsavedWarning, match="`numbers` was changed in the block"):
        with model.trace(PROMPT, **GREEDY):
            first = next(numbers).save()
    assert first == 1


def deeper(depth: int) -> int:
    return deeper(depth + 1) + 1


class PlaceError(Exception):
    def __init__(self, *, place: str) -> None:
        super().__init__(place)
        self.place = place


def test_errors_of_all_kinds_arrive_as_they_are(model: Any) -> None:
    with pytest.raises(RecursionError) as deep:
        with model.trace(PROMPT, **GREEDY):
            deeper(0)
    assert traceback.extract_tb(deep.value.__traceback__)[-1].line == "return deeper(depth + 1) + 1"
    with pytest.raises(PlaceError) as caught:
        with model.trace(PROMPT, **GREEDY):
            raise PlaceError(place="here")
    assert caught.value.place == "here"


def test_large_results_do_not_pass_through_messages(model: Any) -> None:
    channel = model._engine._channel
    with model.trace(PROMPT, **GREEDY):
        big = torch.arange(60_000_000, dtype=torch.float32).save()
        small = model.logits.save()
    assert big.shape == (60_000_000,)
    assert big[-1] == 59_999_999
    assert small.shape[0] == 1
    assert channel._port.lent == 0


def test_large_arguments_too(model: Any) -> None:
    vectors = torch.randn(1000, 4000)
    with model.trace(PROMPT, **GREEDY):
        total = vectors.sum().save()
    assert_close(total, vectors.sum())


def test_a_block_is_sent_once(model: Any) -> None:
    sizes = []
    pack = model._engine._channel._port.pack

    def weighed(value: Any) -> bytes:
        message = pack(value)
        sizes.append(len(message))
        return message

    model._engine._channel._port.pack = weighed
    for _ in range(2):
        before = len(sizes)
        with model.trace(PROMPT, **GREEDY):
            logits = model.logits.save()
        first, second = (sizes[0], sizes[before])
    del model._engine._channel._port.pack
    assert second < first / 2


def test_nodes_and_models_mean_the_same_on_both_sides(model: Any) -> None:
    chosen = [model.model.layers[0], model.model.layers[2].mlp]
    with model.trace(PROMPT, **GREEDY):
        values = [summed(node.output) for node in chosen].save()
        kept = [chosen[1]].save()
        same = (chosen[0] == model.model.layers[0]).save()
    assert same
    assert kept == [chosen[1]]
    assert_close(values[0], hf_stream("llama", ids_of("llama")).resid_post[0])


def summed(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0] + output[1]


def test_the_tokenizer_and_text_helpers_work_in_the_block(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY) as tracer:
        tokens = tracer.tokens.save()
        where = list(tracer.positions_of("Eiffel Tower")).save()
        length = len(model.tokenizer.encode("Water")).save()
    assert "".join(tokens) == PROMPT
    assert where == list(model.positions_of("Eiffel Tower", PROMPT))
    assert length > 0


@pytest.mark.parametrize("call", ["close", "vllm_entrypoint"])
def test_the_engine_itself_is_not_there_in_the_block(model: Any, call: str) -> None:
    with pytest.raises(insitu.InsituError, match="block"):
        with model.trace(PROMPT, **GREEDY):
            thing = getattr(model, call)
            if callable(thing):
                thing()
    assert model.dispatched


def test_check_runs_on_workers(model: Any) -> None:
    assert model.check(["Water boils at"], show=False).passed


def test_a_dead_worker_is_said_to_be_dead() -> None:
    with worker() as model:
        (process,) = model.vllm_entrypoint.llm_engine.model_executor.workers
        os.kill(process.proc.pid, signal.SIGKILL)
        with pytest.raises(insitu.EngineError, match=r"worker|engine"):
            for _ in range(50):
                with model.trace(PROMPT, **GREEDY):
                    model.logits.save()
