"""A model provider for Inspect: ``inspect eval task.py --model insitu/MODEL``, with a block beside every generation.

Found by Inspect through its entry point, wherever both are installed (``pip install 'insitu[inspect]'``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import torch
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    modelapi,
)
from inspect_ai.tool import ToolChoice, ToolInfo

from insitu.block import ArgumentError
from insitu.engine.client.model import VLLM
from insitu.from_file import function_in

# What vLLM calls the settings of a generation that Inspect has under other names, or the same.
_SAMPLING = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "stop_seqs": "stop",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "num_choices": "n",
}
# Settings of how Inspect runs, not of what is generated.
_OF_INSPECT = {
    "max_retries",
    "timeout",
    "attempt_timeout",
    "max_connections",
    "adaptive_connections",
    "cache",
    "batch",
    "system_message",
    "extra_headers",
    "modalities",
}


@modelapi(name="insitu")
def insitu() -> type[ModelAPI]:
    """The provider, by the name that stands before the slash."""
    return InsituAPI


class InsituAPI(ModelAPI):
    """``get_model("insitu/MODEL", block=..., **engine_args)``, or ``-M block=FILE.py:NAME -M dtype=bfloat16``.

    ``block(tracer, model)`` runs beside every generation: it may read and edit as any block of ``model``, and what it
    returns is in the output's ``metadata["insitu"]``, tensors as lists (with several choices, a list of what it
    returned for each). Other arguments are the engine's. Raises ``ArgumentError`` for tools, for content that is not
    text, and for settings of a generation that it can't pass on.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008, as the class that it extends has it
        block: Callable[[Any, Any], Any] | str | None = None,
        **engine_args: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        self._block = function_in(block, "block") if isinstance(block, str) else block
        self._engine_args = engine_args
        self._loop: Any = None
        self._model: Any = None

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        if tools:
            raise ArgumentError("the provider insitu/ runs no tools: give the task a solver without them")
        model, block = self._running(), self._block

        def beside(tracer: Any) -> tuple[Any, Any]:
            found = None if block is None else block(tracer, model)
            return found, tracer.result

        returned = await model.run(beside, [_message(each) for each in input], **_sampling(config))
        several = isinstance(returned, list)
        found = [one for one, _ in returned] if several else returned[0]
        result = (returned[0] if several else returned)[1]
        written = sum(len(choice.token_ids) for choice in result.outputs)
        read = len(result.prompt_token_ids)
        return ModelOutput(
            model=self.model_name,
            choices=[self._choice(choice) for choice in result.outputs],
            usage=ModelUsage(input_tokens=read, output_tokens=written, total_tokens=read + written),
            metadata=None if block is None else {"insitu": _plain(found)},
        )

    def max_connections(self) -> int:
        """The engine batches them; the more there are, the faster it is."""
        return 64

    def connection_key(self) -> str:
        return self.model_name

    async def aclose(self) -> None:
        self._close()

    def close(self) -> None:
        self._close()

    def _running(self) -> Any:
        """The engine belongs to one event loop, and each evaluation has its own."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._close()
            self._model, self._loop = VLLM(self.model_name, mode="async", **self._engine_args), loop
        return self._model

    def _close(self) -> None:
        model, self._model, self._loop = self._model, None, None
        if model is not None:
            model.close()

    def _choice(self, choice: Any) -> ChatCompletionChoice:
        message = ChatMessageAssistant(content=choice.text, model=self.model_name, source="generate")
        stopped = "max_tokens" if choice.finish_reason == "length" else "stop"
        return ChatCompletionChoice(message=message, stop_reason=stopped)


def _message(message: ChatMessage) -> dict[str, str]:
    if not isinstance(message.content, str) and any(part.type != "text" for part in message.content):
        kinds = sorted({part.type for part in message.content} - {"text"})
        raise ArgumentError(f"the provider insitu/ takes text; a message has {', '.join(kinds)}")
    return {"role": message.role, "content": message.text}


def _sampling(config: GenerateConfig) -> dict[str, Any]:
    given = config.model_dump(exclude_none=True)
    unknown = sorted(given.keys() - _SAMPLING.keys() - _OF_INSPECT)
    if unknown:
        raise ArgumentError(f"the provider insitu/ does not pass {', '.join(unknown)} on: leave it out")
    # Without a bound, as far as the context goes; vLLM's own default is 16 tokens.
    return {"max_tokens": None} | {_SAMPLING[name]: value for name, value in given.items() if name in _SAMPLING}


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ArgumentError(f"block: a {type(value).__name__} does not go into an evaluation's log: return plain data")
