"""A request before it runs, and what it has left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm import RequestOutput, SamplingParams

from insitu.block import Lost
from insitu.run import Outcome


@dataclass(frozen=True)
class Prepared:
    """A prompt and its sampling settings, checked before anything runs. ``tenant``: at a server, whose it is."""

    prompt: dict[str, Any]
    params: SamplingParams
    lora: Any = None
    tenant: str = ""


@dataclass
class Result:
    """What a traced request left: an outcome for each of its sequences, and vLLM's own output."""

    outcomes: list[Outcome] = field(default_factory=list)
    output: Any = None

    @property
    def error(self) -> BaseException | None:
        """That of an edit which ran beside it, else its own."""
        if self.output is not None and self.output.error is not None:
            return self.output.error
        return next((outcome.error for outcome in self.outcomes if outcome.error is not None), None)

    @property
    def lost(self) -> list[Lost]:
        return [each for outcome in self.outcomes for each in outcome.lost]

    @property
    def saves(self) -> dict[str, Any]:
        """Saved values by name; where the request has several sequences, lists of them."""
        if len(self.outcomes) == 1:
            return self.outcomes[0].saves
        names = dict.fromkeys(name for outcome in self.outcomes for name in outcome.saves)
        return {name: [outcome.saves.get(name) for outcome in self.outcomes] for name in names}

    def share(self) -> None:
        """Gives the output what was saved, beside what edits saved, and each completion that of its own sequence; also
        where a block has saved the output."""
        saved = (value for outcome in self.outcomes for value in outcome.saves.values())
        for output in (self.output, *(value for value in saved if isinstance(value, RequestOutput))):
            own = self._beside_itself() if output is self.output else _without_outputs(self.saves)
            vars(output)["saves"] = {**vars(output).get("saves", {}), **own}
            for completion, outcome in zip(output.outputs, self.outcomes, strict=False):
                beside = vars(completion).get("saves", {})
                vars(completion)["saves"] = {**beside, **_without_outputs(outcome.saves)}

    def _beside_itself(self) -> dict[str, Any]:
        return {name: value for name, value in self.saves.items() if value is not self.output}

    def bound(self, name: str) -> dict[str, Any]:
        """The name with what the block bound to it, saved or not, if it was asked to export it."""
        bound = self.outcomes[0].bound if self.outcomes else {}
        return {name: bound[name]} if name in bound else {}

    @property
    def returned(self) -> Any:
        values = [outcome.returned for outcome in self.outcomes]
        return values[0] if len(values) == 1 else values


def _without_outputs(saves: Mapping[str, Any]) -> dict[str, Any]:
    """Without the output itself, which would then hold itself."""
    return {name: value for name, value in saves.items() if not isinstance(value, RequestOutput)}
