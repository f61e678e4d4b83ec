"""Two GPUs under tensor parallelism: blocks see and do what they see and do on one, within bfloat16's rounding.

`pytest -m gpu tests/gpu/test_two_gpus.py`; `VLLM_USE_V2_MODEL_RUNNER=0` takes V1. One token alone is allowed, so
that rounding can't lead two engines apart.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import insitu
from tests.gpu import ranks
from tests.gpu.ranks import BLOCKS, KV_HEADS, VOCABULARY, experts, largest_difference, tensors_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(280, method="thread"),
]

SETTINGS = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True, "detokenize": False, "allowed_token_ids": [77]}
ENGINE = {
    "dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 320, "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 2**30, "skip_tokenizer_init": True, "dispatch": True,
}  # fmt: skip
BOUND = 0.08
PROMPTS = [
    torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (40, 7, 129, 1)
]


@pytest.fixture(scope="module", params=["mixtral", *(name for name in KV_HEADS if name != "mixtral")])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engines(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """On two ranks, and on one. Llama's are compiled, with CUDA graphs."""
    folder = str(tmp_path_factory.mktemp(kind))
    ranks.save_model(kind, folder)
    settings = {**ENGINE, "enforce_eager": kind != "llama"}
    with (
        insitu.VLLM(folder, **settings) as one,
        insitu.VLLM(folder, **settings, tensor_parallel_size=2) as two,
    ):
        yield two, one


@pytest.fixture(scope="module")
def model(engines: tuple[Any, Any]) -> Any:
    return engines[0]


@pytest.fixture(autouse=True)
def nothing_left(engines: tuple[Any, Any]) -> Iterator[None]:
    yield
    assert [each.in_flight() for each in engines] == [0, 0]


def compare(engines: tuple[Any, Any], block: Callable[[Any, Any], Any], what: str, prompts: Any = PROMPTS) -> None:
    ours, wanted = [each.run(functools.partial(block, each), prompts, **SETTINGS) for each in engines]
    print(f"{what}: {largest_difference(ours, wanted, what, BOUND):.1e}")


def test_every_module(engines: tuple[Any, Any], kind: str) -> None:
    compare(engines, lambda model, tracer: tracer.cache(inputs=True), f"{kind}, all modules", PROMPTS[0])


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
def test_a_block(engines: tuple[Any, Any], kind: str, block: Callable[[Any, Any], Any]) -> None:
    compare(engines, block, f"{kind}, {block.__name__}")


def test_experts(engines: tuple[Any, Any], kind: str) -> None:
    if kind != "mixtral":
        pytest.skip("has none")
    compare(engines, experts, "experts")


def test_twenty_runs_are_identical(model: Any) -> None:
    def block(tracer: Any) -> Any:
        seen = []
        for _ in tracer.iter[:]:
            model.model.layers[1].self_attn.qkv_proj.output[0][:, 100:900] *= 1.5
            seen += [model.resid_post[1], model.q[2], model.attn_pattern[3], model.logits]
        return seen

    first, *others = [tensors_of(model.run(block, PROMPTS, **SETTINGS)) for _ in range(20)]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_block_may_draw_what_it_reads(model: Any) -> None:
    def block(tracer: Any) -> Any:
        read = []
        for _ in tracer.iter[:]:
            for i, layer in enumerate(model.model.layers):
                if random.random() < 0.5:
                    layer.self_attn.attn.output[:] *= random.random()
                    read.append(i)
                if random.random() < 0.3:
                    model.unembed(model.resid_post[i])
        return len(read)

    for _ in range(5):
        assert len(model.run(block, PROMPTS * 3, **SETTINGS)) == 12


def test_an_error_in_a_block_is_its_own(engines: tuple[Any, Any]) -> None:
    model = engines[0]
    found = []
    with pytest.raises(ZeroDivisionError) as caught, model.trace(**SETTINGS) as tracer:
        seen = [].save()
        with tracer.invoke(PROMPTS[0]):
            seen.append(model.resid_post[1])
        with tracer.invoke(PROMPTS[1]):
            model.model.layers[1].self_attn.qkv_proj.output[0][:] = 1 / 0
        with tracer.invoke(PROMPTS[2]):
            seen.append(model.resid_post[1])
    assert caught.value.invoke == 1
    for prompt in (PROMPTS[0], PROMPTS[2]):
        found.append(engines[1].run(lambda tracer: engines[1].resid_post[1], prompt, **SETTINGS))
    largest_difference(sorted(seen, key=len), sorted(found, key=len), "beside an error", BOUND)
    with pytest.raises(RuntimeError, match=r"size|shape"):  # on all ranks, in a module that a block calls
        model.run(lambda tracer: model.model.layers[0].self_attn.o_proj(model.embed[:, :10]), PROMPTS[0], **SETTINGS)
    compare(engines, ranks.standard_names, "after errors")


def test_requests_that_are_aborted(engines: tuple[Any, Any]) -> None:
    model = engines[0]
    engine = model.vllm_entrypoint.llm_engine
    core, steps = engine.engine_core, iter(range(1000))

    def get_output() -> Any:
        if next(steps) == 4:
            names = sorted(engine.output_processor.request_states, key=lambda name: int(name.split("-")[0]))
            engine.abort_request(names[::2], internal=True)
        return type(core).get_output(core)

    core.get_output = get_output
    try:
        with pytest.raises(Exception, match="2 of 4") as caught:
            with model.trace(**{**SETTINGS, "max_tokens": 8}) as tracer:
                rows = [].save()
                for prompt in PROMPTS:
                    with tracer.invoke(prompt):
                        rows.append([model.model.layers[1].self_attn.attn.output[-1] for _ in tracer.iter[:]])
    finally:
        del core.get_output
    found = [(error.invoke, str(error)) for error in caught.value.exceptions]
    assert found == [(i, "the request was aborted before it ended") for i in (0, 2)]
    assert [len(each) for each in rows] == [8, 8]
    compare(engines, ranks.standard_names, "after aborts")


def test_many_traced_requests_beside_untraced_ones(engines: tuple[Any, Any], kind: str) -> None:
    from vllm import SamplingParams

    model, one = engines
    generator = random.Random(0)
    prompts = [[generator.randrange(3, VOCABULARY) for _ in range(generator.randrange(1, 40))] for _ in range(320)]
    traced, untraced = prompts[:256], [{"prompt_token_ids": prompt} for prompt in prompts[256:]]
    llm = model.vllm_entrypoint
    llm.enqueue(untraced, SamplingParams(**{**SETTINGS, "max_tokens": 12}), use_tqdm=False)

    def block(model: Any, tracer: Any) -> Any:
        return [(model.resid_post[1][-1], model.q[2][-1], model.logits) for _ in tracer.iter[:]]

    compare(engines, block, f"{kind}, 256 beside 64", traced)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12] * 64


def test_steps_in_which_nobody_waits_stay_on_graphs(model: Any, kind: str) -> None:
    before = model.stats()
    model.run(lambda tracer: model.resid_post[1], PROMPTS[0], **{**SETTINGS, "max_tokens": 12})
    after = model.stats()
    assert (after.eager_steps - before.eager_steps, after.plain_steps - before.plain_steps >= 11) == (1, True)
