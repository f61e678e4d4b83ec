"""Prompts that hold more than token ids: images, and embeddings in place of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
import transformers
from PIL import Image

import insitu
from tests import models
from tests.engine.helpers import assert_close, assert_greedy, hf_stream, ids_of, own_engine
from tests.models import LAYERS, WIDTH

pytestmark = [pytest.mark.slow, pytest.mark.in_process]

QUERIES, IMAGE = 4, 32
TEXT = "The city of"


def image(seed: int) -> Any:
    pixels = numpy.random.default_rng(seed).integers(0, 255, (IMAGE, IMAGE, 3), dtype=numpy.uint8)
    return Image.fromarray(pixels)


def prompt(seed: int, text: str = TEXT) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": image(seed)}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random BLIP-2: each image becomes four rows before those of the text, in an OPT."""
    folder = str(tmp_path_factory.mktemp("blip2"))
    tokenizer = models._tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = transformers.OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        word_embed_proj_dim=WIDTH,
        ffn_dim=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=512,
        init_std=0.2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    config = transformers.Blip2Config(
        vision_config=transformers.Blip2VisionConfig(**sizes, image_size=IMAGE, patch_size=8),
        qformer_config=transformers.Blip2QFormerConfig(**sizes, encoder_hidden_size=64, vocab_size=64),
        text_config=text,
        num_query_tokens=QUERIES,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_text_hidden_size=32,
        initializer_range=0.2,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.Blip2ForConditionalGeneration(config).eval().save_pretrained(folder)
    images = transformers.BlipImageProcessor(size={"height": IMAGE, "width": IMAGE})
    transformers.Blip2Processor(images, tokenizer, num_query_tokens=QUERIES).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: str) -> Iterator[Any]:
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8}
    with insitu.VLLM(folder, dispatch=True, limit_mm_per_prompt={"image": 1}, **settings) as model:
        yield model


@pytest.fixture(scope="module")
def computed(folder: str) -> Any:
    """What transformers computes for an image and a text: hidden states by layer, then logits."""
    loaded = transformers.Blip2ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)

    @torch.no_grad()
    def compute(seed: int, text: str = TEXT) -> tuple[list[torch.Tensor], torch.Tensor]:
        out = loaded(**processor(images=image(seed), text=text, return_tensors="pt"), output_hidden_states=True)
        return [state[0] for state in out.language_model_outputs.hidden_states], out.logits[0]

    return compute


def test_the_stream_has_a_row_for_each_row_of_the_image(model: Any, computed: Any) -> None:
    with model.trace(max_tokens=1, temperature=0.0) as tracer:
        for seed in (1, 2):
            with tracer.invoke(prompt(seed)):
                before = model.resid_pre[0].save()
                stream = [model.resid_post[layer] for layer in range(LAYERS)].save()
                logits = model.logits.save()
                tokens = tracer.tokens.save()
    for i, seed in enumerate((1, 2)):
        states, wanted = computed(seed)
        assert len(before[i]) == len(tokens[i]) == len(states[0])
        assert tokens[i][:QUERIES] == ["<image>"] * QUERIES
        assert "".join(tokens[i][QUERIES:]) == TEXT
        assert_close(before[i], states[0])
        for layer in range(LAYERS - 1):  # transformers gives the last one normed
            assert_close(stream[i][layer], states[layer + 1])
        assert_close(logits[i], wanted[-1:])
    assert (before[0][:QUERIES] - before[1][:QUERIES]).abs().max() > 0.01
    assert torch.equal(before[0][QUERIES:], before[1][QUERIES:])


def test_edits_reach_the_rows_of_an_image(model: Any, computed: Any) -> None:
    with model.trace(prompt(1), max_tokens=1):
        model.resid_pre[0][:QUERIES] = computed(2)[0][0][:QUERIES]
        logits = model.logits.save()
    assert_close(logits, computed(2)[1][-1:])


def test_the_embedding_ahead_of_the_forward_is_read_and_written(model: Any, computed: Any) -> None:
    table = model.run(lambda tracer: model.embed, "of the city", max_tokens=1)
    with model.trace(max_tokens=2, temperature=0.0) as tracer:
        with tracer.invoke(prompt(1)):
            embed = [model.embed, model.resid_pre[0]].save()
            tracer.next()
            later = model.embed.save()
        with tracer.invoke("of the city"):
            model.embed[:] = 0
            emptied = model.resid_pre[0].save()
    assert embed[0].shape == embed[1].shape == (len(computed(1)[0][0]), WIDTH)
    assert later.shape == (1, WIDTH)
    plain = model.run(lambda tracer: model.resid_pre[0], "of the city", max_tokens=1)
    assert_close(plain - emptied, table)


def test_parts_that_see_run_ahead_of_the_forward_and_say_so(model: Any) -> None:
    with pytest.raises(insitu.NotReachedError, match="never called `vision_model`"):
        model.run(lambda tracer: model.vision_model.output, prompt(1), max_tokens=1)
    assert model.in_flight() == 0


def test_edits_of_one_image_are_not_seen_by_another_request(model: Any, computed: Any) -> None:
    with model.trace(max_tokens=1) as tracer:
        with tracer.invoke(prompt(1)):
            model.embed[:] = 7.0
            model.resid_pre[0][:] = 0
        with tracer.invoke(prompt(1)):
            logits = model.logits.save()
    assert_close(logits, computed(1)[1][-1:])


# -- embeddings in place of tokens ---------------------------------------------------------


@pytest.fixture(scope="module")
def embedding(engines: Any) -> Iterator[Any]:
    settings = {"enable_prompt_embeds": True, "max_num_batched_tokens": 64, "enable_chunked_prefill": True}
    with own_engine(engines, "llama", **settings) as engine:
        yield engine


def table() -> torch.Tensor:
    return models.oracle(models.tiny("llama")).get_input_embeddings().weight.detach()


def test_prompts_given_as_embeddings(embedding: Any) -> None:
    ids = ids_of("llama")
    with embedding.trace(temperature=0.0, max_tokens=3) as tracer:
        for given in ({"prompt_embeds": table()[ids]}, ids):
            with tracer.invoke(given):
                resid = embedding.resid_post[3].save()
                result = tracer.result.save()
    for value, output in zip(resid, result, strict=True):
        assert_close(value, hf_stream("llama", ids).resid_post[3])
        assert_greedy("llama", ids, list(output.outputs[0].token_ids))


def test_the_embedding_of_tokens_beside_prompts_given_as_embeddings(embedding: Any) -> None:
    ids, others = ids_of("llama"), ids_of("llama", "one two three")
    with embedding.trace(temperature=0.0, max_tokens=2, ignore_eos=True) as tracer:
        with tracer.invoke({"prompt_embeds": table()[ids]}):
            tracer.next()
            drawn = embedding.embed.save()
            result = tracer.result.save()
        with tracer.invoke(others):
            embed = embedding.embed.clone().save()
            embedding.embed[:] = table()[ids_of("llama", "hello there")[:1]]
            resid = embedding.resid_pre[0].save()
    assert_close(embed, table()[others])
    assert_close(resid, table()[ids_of("llama", "hello there")[:1]].expand(len(others), WIDTH))
    assert_close(drawn, table()[list(result.outputs[0].token_ids)[:1]])


@pytest.mark.parametrize("company", [False, True])
def test_a_prompt_given_as_embeddings_has_no_token_embedding(embedding: Any, company: bool) -> None:
    ids = ids_of("llama")
    with pytest.raises(insitu.NotReachedError, match="embed_tokens"):
        with embedding.trace(max_tokens=1) as tracer:
            with tracer.invoke({"prompt_embeds": table()[ids]}):
                embedding.embed
            if company:
                with tracer.invoke(ids):
                    beside = embedding.embed.save()
    if company:
        assert_close(beside, table()[ids])


def test_embeddings_that_a_step_does_not_hold_are_refused(embedding: Any) -> None:
    with pytest.raises((insitu.RequestError, insitu.PromptError), match="max_num_batched_tokens"):
        embedding.run(lambda tracer: embedding.logits, {"prompt_embeds": torch.ones(100, WIDTH)}, max_tokens=1)
    assert embedding.in_flight() == 0
