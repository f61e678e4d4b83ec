"""The engine that a capture builds has taps where it reads, and gives what an engine without them does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import insitu
from insitu.dataset.built import model_for, taps_for
from tests.engine.helpers import assert_close

pytestmark = pytest.mark.in_process
ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 256}


@pytest.mark.parametrize(
    ("at", "engine_args", "taps"),
    [
        ("resid_post[4:8]", {}, ["resid_post[4:8]"]),
        (["resid_mid", "logits"], {}, ["resid_mid"]),
        ("model.layers.*.mlp.output", {"dtype": "float32"}, ["model.layers.*.mlp.output"]),
        (["resid_post[4]", "q[3]"], {}, []),
        ("model.layers.3.output[0]", {}, []),
        ("logits", {}, []),
        ("resid_post", {"enforce_eager": True}, []),
        ("resid_post", {"taps": ["resid_pre"]}, []),
        ("resid_post", {"pipeline_parallel_size": 2}, []),
    ],
)
def test_which_taps_it_has(at: Any, engine_args: dict[str, Any], taps: list[str]) -> None:
    assert taps_for(at, engine_args) == taps


@pytest.mark.slow
def test_values_are_those_of_an_engine_without_taps(model: Any, folder: str, texts: list[str], tmp_path: Path) -> None:
    at = ["resid_post[1]", "logits"]
    with model_for(folder, at, ENGINE) as built:
        before = built.stats()
        found = insitu.capture(built, texts, at=at, out=tmp_path / "taps", progress=False)
        after = built.stats()
    assert after.tapped_steps > before.tapped_steps
    assert after.eager_steps == before.eager_steps
    expected = insitu.capture(model, texts, at=at, out=tmp_path / "eager", progress=False)
    for place in found.places:
        for one, other in zip(found[place], expected[place], strict=True):
            assert one[:4] == other[:4]
            assert_close(one.values, other.values, place)


@pytest.mark.slow
def test_a_place_that_no_tap_can_serve_is_left_to_eager_steps(folder: str) -> None:
    shared = "model.layers.0.self_attn.rotary_emb.output"
    with pytest.raises(insitu.SharedModuleError):
        insitu.VLLM(folder, taps=[shared], dispatch=True, **ENGINE)
    with model_for(folder, shared, ENGINE) as built:
        assert not built.stats().tap_bytes
        assert built.run(lambda tracer: built.logits, "the cat", max_tokens=1).shape[0] == 1


@pytest.mark.slow
def test_a_module_that_is_not_there_is_said_at_once(folder: str) -> None:
    with pytest.raises(insitu.UnknownModuleError, match="mpl"):
        model_for(folder, "model.layers.*.mpl.output", ENGINE)


def test_data_that_is_not_there_is_said_before_an_engine_is_built(tmp_path: Path) -> None:
    with pytest.raises(insitu.ArgumentError, match="there is no"):
        insitu.capture("no/such-model", str(tmp_path / "missing.txt"), at="resid_post", out=tmp_path / "out")
