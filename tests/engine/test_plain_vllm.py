"""The ground under all value tests: plain vLLM agrees with transformers on every tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import models

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPTS = ["The capital of Japan is", "Once upon a time there was"]
TOKENS = 8

# In a process of its own: engines of the session's fixtures are not disturbed. Experts come first.
SCRIPT = """
import gc, json, sys
import tests.conftest
from insitu.engine.worker.cpu_experts import let_experts_be_float32
from tests import models
from vllm import LLM, SamplingParams

let_experts_be_float32()
prompts, tokens = json.loads(sys.argv[1])
found = {}
for name in sorted(models.NAMES, key=lambda name: name != "mixtral"):
    llm = LLM(models.tiny(name), dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=2**26)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=1)
    found[name] = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        ids, steps = output.outputs[0].token_ids, output.outputs[0].logprobs
        found[name].append((list(ids), [step[i].logprob for i, step in zip(ids, steps)]))
    del llm  # since 0.32 an engine takes those made before it along when it ends
    gc.collect()
print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, list[tuple[list[int], list[float]]]]:
    arguments = json.dumps([PROMPTS, TOKENS])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, arguments], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.rpartition("FOUND ")[2])


@pytest.mark.slow
@pytest.mark.in_process
@pytest.mark.parametrize("name", models.NAMES)
def test_greedy_tokens_and_their_probabilities(
    name: str, found: dict[str, list[tuple[list[int], list[float]]]]
) -> None:
    import torch

    folder = models.tiny(name)
    for prompt, (tokens, logprobs) in zip(PROMPTS, found[name], strict=True):
        ids = models.encode(folder, prompt)
        assert tokens == models.greedy(folder, ids, TOKENS)
        with torch.no_grad():
            logits = models.oracle(folder)(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
        expected = logits.log_softmax(-1)[range(TOKENS), tokens]
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=1e-4, atol=1e-4)
