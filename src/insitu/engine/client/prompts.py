"""The kinds of prompt that a trace takes, as vLLM's prompt dictionaries."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from insitu.block import PromptError
from insitu.engine.client.limits import Limits

_NO_LIMITS = Limits(sys.maxsize, sys.maxsize, sys.maxsize)


def is_text(prompt: Any) -> bool:
    """Whether it is a text that a tokenizer takes, which need not be tokenised by itself."""
    return type(prompt) is str and _bytes_of(prompt) > 0


def is_short_text(prompt: Any, limits: Limits) -> bool:
    """Whether it is a text that has room even if each of its bytes should be a token."""
    return type(prompt) is str and 0 < _bytes_of(prompt) < min(limits.max_model_len, limits.max_step_tokens) - 16


def _bytes_of(text: str) -> int:
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0


def tokenise(prompts: Sequence[dict[str, Any]], tokenizer: Callable[[], Any], limits: Limits) -> None:
    """Gives those prompts their token ids that are a text without, all in one call of a fast tokenizer."""
    waiting = [prompt for prompt in prompts if prompt.keys() == {"prompt"}]
    if not waiting:
        return
    encode, texts = tokenizer(), [prompt["prompt"] for prompt in waiting]
    fast = len(texts) > 1 and getattr(encode, "is_fast", False)
    ids = encode(texts)["input_ids"] if fast else [encode(text)["input_ids"] for text in texts]
    for prompt, own in zip(waiting, ids, strict=True):
        prompt["prompt_token_ids"] = own
        checked(prompt, limits)


def as_prompt(prompt: Any, tokenizer: Callable[[], Any], limits: Limits) -> dict[str, Any]:
    """One prompt as a vLLM prompt dictionary, with token ids wherever it is text.

    Takes a string, token ids (a list, or a tensor or array of one sequence), a tokenizer's output
    (its mask drops padding), a vLLM prompt dictionary, or a chat (a list of ``{"role", "content"}``).

    Raises ``PromptError`` if it is empty, several prompts at once, too long, or none of these.
    """
    if type(prompt) is list and set(map(type, prompt)) == {int}:
        return checked({"prompt_token_ids": prompt.copy()}, limits)
    if isinstance(prompt, str):
        return checked({"prompt": prompt, "prompt_token_ids": _encoded(prompt, tokenizer)}, limits)
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt, tokenizer, limits)
    if isinstance(prompt, Sequence) and prompt and all(isinstance(part, Mapping) for part in prompt):
        return checked({"prompt_token_ids": _chat_ids(prompt, tokenizer)}, limits)
    return checked({"prompt_token_ids": _ids(prompt)}, limits)


def token_ids(prompt: Any, tokenizer: Callable[[], Any]) -> list[int]:
    """The ids that a prompt of any kind comes to, its length not checked."""
    found = as_prompt(prompt, tokenizer, _NO_LIMITS).get("prompt_token_ids")
    if found is None:
        raise PromptError("this prompt has embeddings or other data instead of text, so that its tokens are not known")
    return found


def require_room(prompt: Mapping[str, Any], max_tokens: int | None, limits: Limits) -> None:
    """Raises ``PromptError`` if the KV cache can't hold a prompt with all that may be generated after it."""
    given = prompt.get("prompt_token_ids", prompt.get("prompt_embeds", ()))
    whole = limits.max_model_len if max_tokens is None else min(limits.max_model_len, len(given) + max_tokens)
    if whole > limits.cache_tokens:
        raise PromptError(
            f"the prompt of {len(given)} tokens and what may be generated come to {whole} tokens, but the KV cache "
            f"has room for {limits.cache_tokens}: lower max_tokens, or load the model with a smaller max_model_len or "
            f"more memory for the KV cache (kv_cache_memory_bytes, gpu_memory_utilization)"
        )


def are_several(prompt: Any) -> bool:
    """Whether this is a list of prompts, and not one prompt that happens to be a list."""
    if not isinstance(prompt, (list, tuple)) or not prompt:
        return False
    first = prompt[0]
    if isinstance(first, Mapping):
        return first.keys().isdisjoint({"role", "content"})
    return not isinstance(first, int)


def _from_mapping(prompt: Mapping[str, Any], tokenizer: Callable[[], Any], limits: Limits) -> dict[str, Any]:
    if "input_ids" in prompt:
        ids, mask = _ids(prompt["input_ids"]), prompt.get("attention_mask")
        if mask is not None:
            kept = [int(flag) for flag in _flat(mask) or ()]
            if len(kept) != len(ids):
                raise PromptError(f"attention_mask has {len(kept)} entries for {len(ids)} token ids")
            ids = [token for token, keep in zip(ids, kept, strict=True) if keep]
        return checked({"prompt_token_ids": ids}, limits)
    own = dict(prompt)
    if "prompt_embeds" in own or own.get("multi_modal_data"):
        return own
    if "prompt_token_ids" in own:
        return checked({**own, "prompt_token_ids": _ids(own["prompt_token_ids"])}, limits)
    if isinstance(own.get("prompt"), str):
        return checked({**own, "prompt_token_ids": _encoded(own["prompt"], tokenizer)}, limits)
    if not own.keys().isdisjoint({"role", "content"}):
        return as_prompt([own], tokenizer, limits)
    raise PromptError(f"a prompt dictionary has `prompt`, `prompt_token_ids` or `input_ids`; this one has {_keys(own)}")


def _keys(given: Mapping[Any, Any]) -> str:
    return ", ".join(map(str, given)) or "nothing"


def _encoded(text: str, tokenizer: Callable[[], Any]) -> list[int]:
    if not text:
        raise PromptError("the prompt is empty: give at least one token")
    _require_text(text)
    return tokenizer()(text)["input_ids"]


def _require_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the prompt's character {error.start} is U+{ord(text[error.start]):04X}, half of a surrogate pair, which "
            f"no tokenizer takes: decode the text anew, or replace it: text.encode(errors='replace').decode()"
        ) from None


def _chat_ids(chat: Sequence[Mapping[str, Any]], tokenizer: Callable[[], Any]) -> list[int]:
    for message in chat:
        if not {"role", "content"} <= message.keys():
            raise PromptError(
                f"each message of a chat has 'role' and 'content', such as {{'role': 'user', 'content': 'Hello'}}; "
                f"one has {_keys(message)}"
            )
        if isinstance(message["content"], str):
            _require_text(message["content"])
    if not getattr(tokenizer(), "chat_template", None):
        raise PromptError("this model's tokenizer has no chat template: write the prompt as one string")
    ids = tokenizer().apply_chat_template(list(chat), add_generation_prompt=True, tokenize=True)
    return _ids(ids["input_ids"] if isinstance(ids, Mapping) else ids)


def _ids(value: Any) -> list[int]:
    """Token ids of one sequence, out of a list, a tensor or an array with at most one row."""
    ids = _flat(value)
    if ids is not None:
        if ids and isinstance(ids[0], str):
            raise PromptError(_several(len(ids)) if len(ids) > 1 else "got a list of one text: give the text itself")
        if all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            return ids
    raise PromptError(
        f"a prompt is a string, token ids, a tokenizer's output, a prompt dictionary or a chat; "
        f"got {type(value).__name__}"
    )


def _flat(value: Any) -> list[Any] | None:
    """The entries of one sequence, as Python has them; None if it is none."""
    entries = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(entries, Sequence) or isinstance(entries, (str, bytes)):
        return None
    if entries and isinstance(entries[0], (list, tuple)):
        if len(entries) > 1:
            raise PromptError(_several(len(entries)))
        entries = entries[0]
    return [entry.item() if hasattr(entry, "item") else entry for entry in entries]


def _several(count: int) -> str:
    return (
        f"got {count} prompts at once; a trace takes one. For several, open an invoke for each:\n"
        f"    with model.trace(max_tokens=1) as tracer:\n"
        f"        for prompt in prompts:\n"
        f"            with tracer.invoke(prompt):\n"
        f"                ..."
    )


def checked(prompt: dict[str, Any], limits: Limits) -> dict[str, Any]:
    ids = prompt["prompt_token_ids"]
    if not ids:
        raise PromptError("the prompt is empty: give at least one token")
    if len(ids) >= limits.max_model_len:
        raise PromptError(
            f"the prompt has {len(ids)} tokens, and the model's context of {limits.max_model_len} must also hold "
            f"the first generated one: shorten it, or load the model with a larger max_model_len"
        )
    if len(ids) > limits.max_step_tokens:
        raise PromptError(
            f"the prompt has {len(ids)} tokens, but a step holds {limits.max_step_tokens} and a block must see its "
            f"prompt whole: load the model with {limits.step_setting}={len(ids)} or more"
        )
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        wrong = next(token for token in ids if not 0 <= token < limits.vocab_size)
        raise PromptError(f"token id {wrong} is not in the vocabulary of {limits.vocab_size}")
    return prompt
