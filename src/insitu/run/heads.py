"""Attention by head: queries, keys, values and pattern of one layer, and the keys of earlier steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from insitu.block import LocationError, WriteError
from insitu.run.attention import Kernel
from insitu.run.served import Rows
from insitu.run.stream import Stream
from insitu.tree import Place

_InferenceMode: Any = torch._C._InferenceMode

ATTN_PATTERN = "attn_pattern"
_ARGUMENTS = {"q": "query", "k": "key", "v": "value"}
HEADS = (*_ARGUMENTS, ATTN_PATTERN)


@dataclass(frozen=True)
class Heads(Stream):
    """``q``, ``k`` or ``v``: an argument of an attention module, as ``[tokens, heads, head_size]``."""

    name: str = "q"
    head_size: int = 1

    def parts(self, value: Any) -> list[torch.Tensor]:
        return [self.by_head(self.argument(value))]

    def argument(self, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> torch.Tensor:
        args, kwargs = inputs
        number, keyword = list(_ARGUMENTS).index(self.name), _ARGUMENTS[self.name]
        found = args[number] if number < len(args) else kwargs.get(keyword)
        if found is None:
            raise LocationError(f"`{self.place.call}` is given no {keyword}")
        return found

    def by_head(self, flat: torch.Tensor) -> torch.Tensor:
        """A view, so that edits of it are edits of what is served."""
        return flat if flat.dim() == 3 else flat.unflatten(-1, (-1, self.head_size))


@dataclass(frozen=True)
class Pattern(Stream):
    """How much each head of an attention module takes of each key: not a value of the model, but computed."""

    what: str = ""
    kernel: Kernel | None = None
    q: Heads = Heads(Place("", "input"))
    k: Heads = Heads(Place("", "input"))

    def compute(self, inputs: Any, earlier: torch.Tensor | None) -> torch.Tensor:
        """``[heads, queries, keys]``. ``earlier``: the keys of the steps before."""
        (q,), (k,) = self.q.parts(inputs), self.k.parts(inputs)
        keys = k if earlier is None else torch.cat([earlier, k])
        assert self.kernel is not None
        return self.kernel.pattern(q.detach(), keys.detach())


def heads_at(path: str, module: Any, name: str) -> Heads:
    size = module.head_size
    return Heads(
        Place(path, "input"), name=name, head_size=getattr(module, "head_size_v", size) if name == "v" else size
    )


class KeyRecorder:
    """The keys that one run's tokens had in each step, by attention module. Those that the KV cache keeps are laid
    out and rounded as the backend likes, and may be given away."""

    first_step = 0

    def __init__(self, keys: Iterable[Heads]) -> None:
        self._by_place = {heads.place: heads for heads in keys}
        self.places: frozenset[Place] = frozenset(self._by_place)
        self.paths: list[str] = [place.path for place in self._by_place]
        self._steps: dict[Place, dict[int, torch.Tensor]] = {}

    def record(self, place: Place, step: int, live: Any, rows: Rows, fixed: frozenset[int]) -> None:
        heads = self._by_place[place]
        flat = heads.argument(live)
        mine = rows.of(flat)
        if mine is not None:
            with _InferenceMode(False):  # what is copied inside it can't be used freely later
                self._steps.setdefault(place, {})[step] = heads.by_head(flat[mine].clone())

    def forget(self, step: int) -> None:
        for steps in self._steps.values():
            steps.pop(step, None)

    def before(self, place: Place, step: int, what: str) -> torch.Tensor:
        """The keys of all steps before ``step``, in order."""
        found = self._steps.get(place, {})
        missing = [earlier for earlier in range(step) if earlier not in found]
        if missing:
            raise LocationError(
                f"{what} of step {step} needs the keys of every step before, and those of step {missing[0]} were not "
                f"given to `{place.call}` for this request (was its layer skipped?)"
            )
        return torch.cat([found[earlier] for earlier in range(step)])


def reads_later_patterns(mentioned: frozenset[str], length: int | None) -> bool:
    """Whether a block whose text names these may read patterns after the prefill, of a request of so many steps."""
    return ATTN_PATTERN in mentioned and length != 1 and not mentioned.isdisjoint(("iter", "all", "next"))


def not_recorded(what: str, step: int) -> LocationError:
    return LocationError(
        f"{what} of step {step} needs the keys of every step before, and they are recorded only for a block whose "
        f"own text, or that of a function it calls, says both `attn_pattern` and how it gets to later steps "
        f"(`tracer.iter`, `.all()` or `.next()`): write them out there"
    )


def not_writable(what: str) -> WriteError:
    return WriteError(
        f"{what} is computed from q and k beside the model, which keeps no such tensor: editing it changes nothing. "
        f"Edit model.q, model.k or model.v of that layer, or what comes of it (model.attn_out); to change the values "
        f"for yourself, clone them first"
    )
