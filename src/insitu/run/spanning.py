"""Operations that call a module of which each stage of a pipeline runs a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from insitu.run.interleaver import Interleaver
from insitu.run.stages import Link, Stages
from insitu.tree import Place


class Spanning(Interleaver):
    """Such a call begins on the first stage and returns on the last: what it takes and gives elsewhere is what the
    stages hand on."""

    stages: Stages
    adaptable: Callable[[], set[str]] = set
    """The modules of this stage for which there may be adapters."""

    def __init__(self, root: torch.nn.Module, unembed: Callable[..., Any], safe_ids: int, link: Link) -> None:
        super().__init__(root, unembed, safe_ids)
        self._link = link
        self._handed_on: set[Place] = set()

    def _pass(self, path: str, op: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if op:
            spans = isinstance(function, torch.nn.Module) and self._spans_stages(function)
            note = self._handed_on.update if spans else self._handed_on.difference_update
            note(Place(path, site, op) for site in self._foreign_sites())
        return super()._pass(path, op, function, args, kwargs)

    def _spans_stages(self, module: torch.nn.Module) -> bool:
        return self.modules.path_now(module, self._active) in self.stages.spanning

    def _foreign_sites(self) -> list[str]:
        stage, last = self._link.stage, self._link.stages - 1
        return ["input"] * (stage > 0) + ["output"] * (stage < last)

    def _is_handed_on(self, place: Place) -> bool:
        return bool(place.op) and place in self._handed_on
