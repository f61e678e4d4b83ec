"""Engines that can't be traced, or only in part, say so by name and leave nothing behind."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import transformers

import insitu
from insitu.engine.client.launch import refusal
from tests import models
from tests.engine.helpers import PROMPT, assert_close, assert_greedy, hf_stream, ids_of, own_engine, plain

pytestmark = pytest.mark.slow

SETTINGS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128}


def encoder(folder: Path) -> str:
    tokenizer = models._tokenizer()
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    transformers.BertModel(transformers.BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def encoder_and_decoder(folder: Path) -> str:
    tokenizer = models._tokenizer()
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=128,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        max_target_positions=128,
        max_source_positions=50,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    transformers.WhisperForConditionalGeneration(config).save_pretrained(folder)
    features = transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=1)
    transformers.WhisperProcessor(features, tokenizer).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("build", "settings", "kind"),
    [
        (encoder, {}, "pooling"),
        (lambda folder: models.tiny("llama"), {"runner": "pooling", "convert": "embed"}, "pooling"),
        (encoder_and_decoder, {}, "encoder-decoder"),
    ],
    ids=["an encoder", "a decoder that pools", "an encoder and a decoder"],
)
def test_models_that_are_no_decoders_are_refused(
    build: Any, settings: dict[str, Any], kind: str, tmp_path: Path, llama: Any
) -> None:
    model = insitu.VLLM(build(tmp_path), **SETTINGS, **settings)
    with pytest.raises(insitu.EngineError, match=f"is a {kind} model; insitu traces models that generate text"):
        model.dispatch()
    assert not model.dispatched
    logits = llama.run(lambda tracer: llama.logits, PROMPT, max_tokens=1)
    assert_close(logits, hf_stream("llama", ids_of("llama")).logits[-1:])


def test_a_speculative_engine_refuses_traces_and_runs_the_rest(engines: Any) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    ids = 5 * ids_of("llama")
    with own_engine(engines, "llama", speculative_config=drafts) as model:
        with pytest.raises(insitu.RequestError, match="speculative_config"):
            model.trace(ids, max_tokens=4)
        with pytest.raises(insitu.RequestError, match="speculative_config"):
            model.run(lambda tracer: model.logits, ids, max_tokens=4)
        (output,) = plain(model, [ids], max_tokens=20, ignore_eos=True)
        assert_greedy("llama", ids, list(output.outputs[0].token_ids))
        assert model.in_flight() == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("enable_batch_sharded_sampling", "enable_batch_sharded_sampling: "),
        ("enable_dbo", "enable_dbo or ubatch_size: "),
    ],
)
def test_steps_that_are_split_are_refused(name: str, said: str, llama: Any) -> None:
    """By the config that vLLM has then: both are for GPUs alone, and the first is new in 0.32."""
    config = llama.vllm_entrypoint.llm_engine.vllm_config
    assert refusal("tiny", config) is None
    split = copy.copy(config)
    split.parallel_config = copy.copy(config.parallel_config)
    setattr(split.parallel_config, name, True)
    assert str(refusal("tiny", split)).startswith(said)
