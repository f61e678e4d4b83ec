"""What the engine tests share: reference values, comparison, engines of a test's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import insitu
from tests import models

BOUND = 1e-5
PROMPT = "The Eiffel Tower is in the city of"
Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine to its end, on the event loop of a file's tests."""


def ids_of(name: str, text: str = PROMPT) -> list[int]:
    return models.encode(models.tiny(name), text)


@functools.lru_cache(maxsize=256)
def _activations(name: str, ids: tuple[int, ...]) -> dict[str, models.Activation]:
    return models.hf_activations(models.oracle(models.tiny(name)), ids)


def hf(name: str, ids: Sequence[int]) -> dict[str, models.Activation]:
    """What every module of the transformers model takes and returns for these ids."""
    return _activations(name, tuple(ids))


def assert_greedy(name: str, ids: Sequence[int], tokens: Sequence[int]) -> None:
    """That transformers, given the same beginning, would have drawn each of `tokens` too."""
    with torch.no_grad():
        logits = models.oracle(models.tiny(name))(torch.tensor([[*ids, *tokens]])).logits[0]
    assert list(tokens) == logits[len(ids) - 1 : -1].argmax(-1).tolist()


@functools.lru_cache(maxsize=256)
def _stream(name: str, ids: tuple[int, ...]) -> models.Residuals:
    return models.hf_residuals(models.oracle(models.tiny(name)), ids)


def hf_stream(name: str, ids: Sequence[int]) -> models.Residuals:
    """The residual stream of the transformers model for these ids."""
    return _stream(name, tuple(ids))


def difference(value: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest absolute difference, relative to the largest value where that is above 1."""
    assert value.shape == wanted.shape, f"shape {tuple(value.shape)}, wanted {tuple(wanted.shape)}"
    assert torch.isfinite(value).all(), "not all values are finite"
    return ((value - wanted).abs().max() / wanted.abs().max().clamp(min=1)).item()


def assert_close(value: torch.Tensor, wanted: torch.Tensor, what: str = "", bound: float = BOUND) -> None:
    found = difference(value, wanted)
    assert found <= bound, f"{what}: differs by {found:.2e}, bound {bound:.0e}"


def trunk(model: Any) -> Any:
    """The module that holds a model's layers."""
    return model.transformer if "transformer" in dir(model) else model.model


def layers(model: Any) -> Any:
    return trunk(model).h if "transformer" in dir(model) else trunk(model).layers


def summed(output: Any) -> torch.Tensor:
    """A decoder layer's output as transformers returns it, where vLLM leaves the two summands apart."""
    return output if isinstance(output, torch.Tensor) else output[0] + output[1]


@contextmanager
def own_engine(engines: Any, name: str, **engine_args: Any) -> Iterator[Any]:
    """A float32 engine beside those of the session's fixture `engines`, with arguments of its own. Where these say
    nothing of the session's kind, it would be the same in every session: its tests run without ``--engine``."""
    if engines.settings and not engines.settings.keys() & engine_args.keys():
        pytest.skip("this engine is the same without --engine")
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, **engine_args}
    with insitu.VLLM(models.tiny(name), dispatch=True, **settings) as model:
        yield model


def plain(model: Any, prompts: Sequence[Any], **sampling: Any) -> list[Any]:
    """vLLM's own outputs, no block anywhere. Prompts are token ids."""
    from vllm import SamplingParams

    given = [{"prompt_token_ids": list(ids)} for ids in prompts]
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    return model.vllm_entrypoint.generate(given, params, use_tqdm=False)


def enqueue(model: Any, prompts: Sequence[Sequence[int]], tokens: Sequence[int]) -> None:
    """Hands untraced requests to vLLM, which runs them whenever somebody steps the engine."""
    from vllm import SamplingParams

    given = [{"prompt_token_ids": list(ids)} for ids in prompts]
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in tokens]
    model.vllm_entrypoint.enqueue(given, params, use_tqdm=False)


def completed(model: Any) -> list[Any]:
    """The outputs of the enqueued requests, in the order in which they were handed over."""
    found = model.vllm_entrypoint.wait_for_completion(use_tqdm=False)
    return sorted(found, key=lambda output: int(output.request_id.split("-")[0]))


def module_paths(root: torch.nn.Module) -> list[str]:
    """Every module under each of its paths. For vLLM's `apply_model`, which calls it where the model is."""
    return [path for path, _ in root.named_modules(remove_duplicate=False)]


def watched_modules(root: torch.nn.Module) -> list[str]:
    """Those that have a `forward` of their own. For vLLM's `apply_model`."""
    return [path for path, module in root.named_modules() if "forward" in module.__dict__]


Edit = Callable[[torch.Tensor], torch.Tensor]


def hf_edited(
    name: str, ids: Sequence[int], outputs: dict[str, Edit] | None = None, inputs: dict[str, Edit] | None = None
) -> dict[str, models.Activation]:
    """As `hf`, with what some modules return, or are given first, replaced by what an edit makes of it.

    Edits get and return tensors without a batch axis, and may change what they get in place.
    """
    model = models.oracle(models.tiny(name))

    def edited_output(edit: Edit) -> Callable[[Any], Any]:
        def hook(output: Any) -> Any:
            if isinstance(output, tuple):
                return (edit(output[0][0].clone())[None], *output[1:])
            return edit(output[0].clone())[None]

        return hook

    def edited_input(edit: Edit) -> Callable[..., Any]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (edit(args[0][0].clone())[None], *args[1:]), kwargs
            first, value = next(iter(kwargs.items()))
            return args, {**kwargs, first: edit(value[0].clone())[None]}

        return hook

    hooks = [
        model.get_submodule(path).register_forward_pre_hook(edited_input(edit), with_kwargs=True)
        for path, edit in (inputs or {}).items()
    ]
    try:
        edits = {path: edited_output(edit) for path, edit in (outputs or {}).items()}
        return models.hf_activations(model, ids, edits)
    finally:
        for hook in hooks:
            hook.remove()


def last_logits(seen: dict[str, models.Activation]) -> torch.Tensor:
    return seen[""].output["logits"][-1:]


def oracle_logits(name: str, path: str, side: str, edit: Edit) -> torch.Tensor:
    """The last position's logits for `PROMPT` with one edit, of a module's `"output"` or `"input"`."""
    return last_logits(hf_edited(name, ids_of(name), **{f"{side}s": {path: edit}}))


def at_once(count: int, function: Callable[[int], Any]) -> list[Any]:
    """What the function gives for each number below ``count``, all called at the same time."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(function, range(count)))
