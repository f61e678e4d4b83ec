"""Tokens as text, and texts as positions of tokens."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import insitu
from insitu.engine.client.tokens import positions_of, spans_by_decoding, token_strings
from tests.engine.helpers import PROMPT
from tests.models import SENTENCES, tiny
from tests.models import tokenizer as tokenizer_of


def _sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2's: spaces are part of the word after them, bytes stand for unknown characters, `<s>` goes first."""
    special = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    bpe = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bpe.train_from_iterator(
        [*SENTENCES, "▁Eiffel ▁Tower"],
        trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False),
    )
    bpe.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _trimmed() -> PreTrainedTokenizerFast:
    """Byte-level, with offsets that leave the space before a word out, as GPT-2's."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=True)
    bpe.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=["<s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>")


class Slow:
    """A tokenizer that knows no offsets."""

    is_fast = False

    def __init__(self, fast: Any) -> None:
        self._fast = fast

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return self._fast.decode(*args, **kwargs)

    def convert_ids_to_tokens(self, token: int) -> str:
        return self._fast.convert_ids_to_tokens(token)


TOKENIZERS = {"bytes": tokenizer_of(tiny("llama")), "trimmed": _trimmed(), "sentencepiece": _sentencepiece()}


@pytest.fixture(params=[*TOKENIZERS])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]


@pytest.fixture(params=["with the source", "of the ids", "by decoding"])
def look_up(request: pytest.FixtureRequest, tokenizer: Any) -> Any:
    """`positions_of` for a source text, by each way there is."""

    def found(source: str, text: str, **which: Any) -> Any:
        ids = tokenizer(source)["input_ids"]
        if request.param == "by decoding":
            return positions_of(Slow(tokenizer), ids, text, **which)
        given_source = source if request.param == "with the source" else None
        return positions_of(tokenizer, ids, text, source=given_source, **which)

    return found


def shown(tokenizer: Any, source: str, positions: range) -> str:
    ids = tokenizer(source)["input_ids"]
    return "".join(token_strings(tokenizer, [ids[i] for i in positions]))


@pytest.mark.parametrize("text", ["Eiffel Tower", "Eiffel", "The", "iff", "city of", "f"])
def test_all_tokens_that_overlap_and_no_others(look_up: Any, tokenizer: Any, text: str) -> None:
    positions = look_up(PROMPT, text)
    inside = shown(tokenizer, PROMPT, positions)
    assert text in inside
    ids = tokenizer(PROMPT)["input_ids"]
    strings = token_strings(tokenizer, ids)
    first, last = strings[positions[0]], strings[positions[-1]]
    assert text not in inside[len(first) :]
    assert text not in inside[: len(inside) - len(last)]


def test_the_space_before_a_word_is_part_of_its_token(look_up: Any) -> None:
    assert look_up(PROMPT, " Eiffel") == look_up(PROMPT, "Eiffel")


@pytest.mark.parametrize("source", ["naïve 東京 🗼🗼 ok", "🗼", "a🗼b", "é東"])
def test_characters_of_several_bytes(look_up: Any, tokenizer: Any, source: str) -> None:
    ids = tokenizer(source)["input_ids"]
    covered: set[int] = set()
    for i, character in enumerate(source):
        if character == " ":
            continue
        occurrence = source[:i].count(character)
        positions = look_up(source, character, occurrence=occurrence)
        assert character in tokenizer.decode([ids[k] for k in positions])
        covered |= set(positions)
    strings = token_strings(tokenizer, ids)
    without_text = {i for i, token in enumerate(ids) if token in tokenizer.all_special_ids or strings[i].isspace()}
    assert covered | without_text == set(range(len(ids)))
    assert not covered & without_text


def test_occurrences(look_up: Any) -> None:
    source = "the city of Rome, the city of Paris, the city of Tokyo"
    every = look_up(source, "city", every=True)
    assert len(every) == 3
    assert [look_up(source, "city", occurrence=i) for i in range(3)] == every
    assert look_up(source, "city") == every[0]
    assert look_up(source, "city", occurrence=-1) == every[2]
    assert every[0].stop <= every[1].start
    with pytest.raises(insitu.PromptError, match=r"`city` occurs 3 times, so there is no occurrence 3 in the prompt"):
        look_up(source, "city", occurrence=3)


def test_what_does_not_occur_is_an_error_with_the_tokens(look_up: Any, tokenizer: Any) -> None:
    for which in ({}, {"every": True}):
        with pytest.raises(
            insitu.PromptError, match="`Rome` does not occur in the prompt; its tokens are 0 "
        ) as caught:
            look_up(PROMPT, "Rome", **which)
        for i, string in enumerate(token_strings(tokenizer, tokenizer(PROMPT)["input_ids"])):
            assert f"{i} {string!r}" in str(caught.value)
    with pytest.raises(insitu.ArgumentError, match="at least one character"):
        look_up(PROMPT, "")


def test_a_long_prompt_s_tokens_are_shown_in_part(tokenizer: Any) -> None:
    ids = tokenizer(" ".join(SENTENCES))["input_ids"]
    with pytest.raises(insitu.PromptError, match=re.escape(", ...,")) as caught:
        positions_of(tokenizer, ids, "Zanzibar")
    assert f"{len(ids) - 1} " in str(caught.value)


def test_special_tokens_are_text_too() -> None:
    tokenizer = TOKENIZERS["bytes"]
    ids = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}], tokenize=True)["input_ids"]
    for way in (tokenizer, Slow(tokenizer)):
        (end,) = positions_of(way, ids, "<|im_end|>")
        assert ids[end] == tokenizer.convert_tokens_to_ids("<|im_end|>")
        inner = positions_of(way, ids, PROMPT)
        assert [ids[i] for i in inner] == tokenizer(PROMPT)["input_ids"]


def test_a_tokenizer_that_changes_the_text() -> None:
    """Looked up in the text as it was written."""
    lower = Tokenizer(models.BPE())
    lower.normalizer = normalizers.Lowercase()
    lower.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    lower.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    lower.train_from_iterator(SENTENCES, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=lower)
    ids = tokenizer(PROMPT)["input_ids"]
    assert positions_of(tokenizer, ids, "Eiffel", source=PROMPT) == positions_of(tokenizer, ids, "eiffel")
    with pytest.raises(insitu.PromptError, match="`Eiffel` does not occur"):
        positions_of(tokenizer, ids, "Eiffel")


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab .éß東🗼\n'1T"), min_size=1, max_size=24), st.sampled_from([*TOKENIZERS]))
def test_decoding_agrees_with_the_tokenizer_s_own_offsets(text: str, name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole, spans = spans_by_decoding(ids, lambda part: tokenizer.decode(list(part)))
    assert whole == tokenizer.decode(ids) == text
    assert len(spans) == len(ids)
    strings = token_strings(tokenizer, ids)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    for i, character in enumerate(text):
        if character.isspace():
            continue
        by_offsets = {k for k, (start, stop) in enumerate(offsets) if start <= i < stop and not strings[k].isspace()}
        assert {k for k, (start, stop) in enumerate(spans) if start <= i < stop} == by_offsets


def test_strings_of_tokens_make_the_text(tokenizer: Any) -> None:
    ids = tokenizer(PROMPT, add_special_tokens=False)["input_ids"]
    assert "".join(token_strings(tokenizer, ids)).lstrip(" ") == PROMPT
    assert token_strings(tokenizer, [0]) == ["<s>"]
    (first, *_), text = tokenizer("🗼", add_special_tokens=False)["input_ids"][-4:], "\N{REPLACEMENT CHARACTER}"
    assert token_strings(tokenizer, [first]) == [text]


# -- with a model -------------------------------------------------------------------------


def test_tokens_in_a_block_grow_with_the_steps(llama: Any) -> None:
    with llama.trace(PROMPT, temperature=0.0, max_tokens=4, ignore_eos=True) as tracer:
        at_start = tracer.tokens.save()
        seen = [].save()
        for _ in tracer.iter[:]:
            llama.logits
            seen.append(tracer.tokens)
        result = tracer.result.save()
        at_end = tracer.tokens.save()
    ids = [*result.prompt_token_ids, *result.outputs[0].token_ids]
    strings = token_strings(llama.tokenizer, ids)
    prompt = len(result.prompt_token_ids)
    assert at_start == strings[:prompt]
    assert seen == [strings[: prompt + step] for step in range(4)]
    assert at_end == strings
    assert "".join(at_start) == PROMPT


def test_tokens_after_next_and_of_forced_ids(llama: Any) -> None:
    with llama.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        llama.samples[0] = 7
        tracer.next()
        tokens = tracer.tokens.save()
        hidden = llama.model.norm.output[0].save()
    assert tokens[-1] == llama.tokenizer.decode([7])
    assert len(tokens) == len(llama.tokenizer(PROMPT)["input_ids"]) + 1
    assert hidden.shape[0] == 1


def test_tokens_of_each_invoke_and_each_sequence(llama: Any) -> None:
    with llama.trace(temperature=1.0, max_tokens=3, ignore_eos=True) as tracer:
        for prompt in SENTENCES[:2]:
            with tracer.invoke(prompt):
                result = tracer.result.save()
                tokens = tracer.tokens.save()
    for prompt, output, strings in zip(SENTENCES, result, tokens, strict=False):
        ids = [*llama.tokenizer(prompt)["input_ids"], *output.outputs[0].token_ids]
        assert strings == token_strings(llama.tokenizer, ids)
    with llama.trace(PROMPT, n=2, seed=5, temperature=1.5, max_tokens=3, ignore_eos=True) as tracer:
        result = tracer.result.save()
        tokens = tracer.tokens.save()
    both = [token_strings(llama.tokenizer, one.token_ids) for one in result[0].outputs]
    assert sorted(strings[-3:] for strings in tokens) == sorted(both)
    assert both[0] != both[1]


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_positions_pick_rows(name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    positions = model.positions_of("Eiffel Tower", PROMPT)
    with model.trace(PROMPT, max_tokens=1) as tracer:
        inside = tracer.positions_of("Eiffel Tower").save()
        rows = model.embed[tracer.positions_of("Eiffel Tower")].save()
        whole = model.embed.save()
        city = tracer.positions_of("city", every=True).save()
    assert inside == positions
    assert city == model.positions_of("city", PROMPT, every=True)
    assert rows.equal(whole[positions.start : positions.stop])
    strings = token_strings(model.tokenizer, model.tokenizer(PROMPT)["input_ids"])
    assert "".join(strings[i] for i in positions) == " Eiffel Tower"


def test_a_text_that_is_not_in_the_prompt_fails_on_its_line(llama: Any) -> None:
    with pytest.raises(insitu.PromptError, match="`Rome` does not occur in the prompt; its tokens are 0 'The'"):
        with llama.trace(PROMPT, max_tokens=1) as tracer:
            tracer.positions_of("Rome")
    with pytest.raises(insitu.PromptError, match="the prompt is empty"):
        llama.positions_of("Rome", "")
    with pytest.raises(insitu.OutsideTraceError, match=r"`tracer.tokens`"):
        with llama.trace(max_tokens=1) as tracer:
            tracer.tokens
            with tracer.invoke(PROMPT):
                pass


def test_every_kind_of_prompt_has_the_same_positions(llama: Any) -> None:
    ids = llama.tokenizer(PROMPT)["input_ids"]
    kinds = [PROMPT, ids, torch.tensor(ids), llama.tokenizer(PROMPT), {"prompt_token_ids": ids}, {"prompt": PROMPT}]
    assert len({llama.positions_of("Tower", kind) for kind in kinds}) == 1


CHAT = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "In which city is the Eiffel Tower?"},
]


def test_a_chat_is_what_vllm_makes_of_it(smollm2: Any) -> None:
    (expected,) = smollm2.vllm_entrypoint.chat(CHAT, use_tqdm=False, sampling_params=_greedy(8))
    with smollm2.trace(CHAT, temperature=0.0, max_tokens=8) as tracer:
        question = tracer.positions_of("Eiffel Tower").save()
        tokens = tracer.tokens.save()
        result = tracer.result.save()
    assert result.prompt_token_ids == expected.prompt_token_ids
    assert result.outputs[0].token_ids == expected.outputs[0].token_ids
    assert question == smollm2.positions_of("Eiffel Tower", CHAT)
    assert tokens[question.start : question.stop] == [" E", "iffel", " Tower"]
    assert tokens[0] == "<|im_start|>"
    assert "".join(tokens) == smollm2.tokenizer.decode(result.prompt_token_ids)


def _greedy(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens)
