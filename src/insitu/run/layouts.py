"""Which tensors of a tensor-parallel forward are whole on every rank, and how the others lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from insitu.block import LocationError
from insitu.run.modules import ModuleTable
from insitu.run.served import map_tensors, tensors_of
from insitu.run.shards import Group, Layout, Split, Summed, are_equal, width_of
from insitu.tree import Place


@dataclass(frozen=True)
class Parallel:
    """A module whose weights lie over the ranks.

    ``opens``: its output is cut, and so is what comes of it; the first of these layouts is the output's own,
    the others are those of its pieces. ``closes``: its input is cut, and its output is not. ``returns``: its
    output is cut, as its input is. ``summed``: ranks may return summands, which somebody else adds up.
    ``inside``: layouts that occur within its own forward.
    """

    opens: tuple[Split, ...] = ()
    closes: Split | None = None
    returns: Split | None = None
    summed: bool = False
    inside: tuple[Split, ...] | None = None


@dataclass
class Gathered:
    """What one place has, made whole. ``value`` is of the structure of ``live``; a tensor that is whole on
    every rank is the live one itself."""

    live: Any
    value: Any
    tensors: list[torch.Tensor] = field(default_factory=list)
    wholes: list[torch.Tensor] = field(default_factory=list)
    layouts: list[Layout | None] = field(default_factory=list)


def gathered_whole(live: Any) -> Gathered:
    """Of a place that is known to be whole on every rank."""
    tensors = _unique(live)
    return Gathered(live, live, tensors, list(tensors), [None] * len(tensors))


class Layouts:
    """Follows one forward. All ranks decide alike, and by nothing that only one of them knows.

    Between a module that cuts and the one that closes it, under the module around both, tensors are known
    by their width; where that says nothing, by whether the ranks agree.
    """

    def __init__(
        self, modules: ModuleTable, parallel: Callable[[Any], Parallel | None], group: Group, width: int
    ) -> None:
        """``width`` is that of the residual stream."""
        found = {path: parallel(module) for path, module in modules.by_path.items()}
        self.parallel: dict[str, Parallel] = {path: each for path, each in found.items() if each is not None}
        self._modules = modules
        self._group = group
        self._width = width
        self._always = {path: list(each.inside) for path, each in self.parallel.items() if each.inside is not None}
        self._open: dict[str, list[Split]] = {}
        self._summing: set[str] = set()
        self._seen: dict[Split, None] = {}

    def restart(self) -> None:
        self._open = dict(self._always)
        self._summing.clear()

    def passed(self, path: str) -> None:
        """A module has returned."""
        each = self.parallel.get(path)
        if each is None:
            return
        around = path.rpartition(".")[0]
        if each.opens:
            known = self._open.setdefault(around, [])
            known += [split for split in each.opens if split not in known]
            self._seen.update(dict.fromkeys(each.opens))
        if each.closes is not None:
            self._open.pop(around, None)
        if each.summed:
            # Whoever adds them up does so in the module around, or in the one around that.
            self._summing.update((around, around.rpartition(".")[0]))

    def gather(self, place: Place, live: Any) -> Gathered:
        """By all ranks. Raises ``LocationError`` on all of them if it can't be told how a tensor lies."""
        gathered = Gathered(live, live)
        replaced: dict[int, torch.Tensor] = {}
        for tensor in _unique(live):
            layout, whole = self._whole(place, tensor)
            gathered.tensors.append(tensor)
            gathered.layouts.append(layout)
            gathered.wholes.append(whole)
            replaced[id(tensor)] = whole
        if any(layout is not None for layout in gathered.layouts):
            gathered.value = map_tensors(live, lambda tensor: replaced[id(tensor)])
        return gathered

    def call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module applied to whole values; what it returns is whole."""
        each = self.parallel.get(path, Parallel())
        if each.closes is not None:
            split = each.closes
            args, kwargs = map_tensors((args, kwargs), lambda tensor: split.part(tensor, self._group))
        value = self._modules[path](*args, **kwargs)
        if each.opens:
            return map_tensors(value, lambda tensor: each.opens[0].whole(self._group.gather(tensor)))
        if each.summed:
            return map_tensors(value, lambda tensor: self._decided(tensor, [Summed()])[1])
        return value

    def _whole(self, place: Place, tensor: torch.Tensor) -> tuple[Layout | None, torch.Tensor]:
        if not tensor.is_floating_point() or not tensor.dim():
            return None, tensor
        own = self.parallel.get(place.path) if not place.op else None
        is_output = place.at("output") == place
        if own is not None and (own.opens or own.closes):
            output = list(own.opens[:1]) or ([Summed()] if own.summed else [])
            return self._decided(tensor, output if is_output else [own.closes] if own.closes else [])
        if own is not None and own.returns is not None and is_output:
            return self._decided(tensor, [own.returns])
        if own is not None and own.summed and is_output:
            return self._decided(tensor, [Summed()])
        inside = self.parallel.get(place.path) if place.op else None
        if inside is not None and inside.closes is not None:  # where there are summands, of the stream's width
            is_cut = width_of(tensor) != self._width and inside.closes.fits(tensor)
            return self._by_comparing(place, tensor, [inside.closes] if is_cut else [])
        around = self._around(place.path)
        if around is None and not place.op:
            return self._outside(place, tensor)
        known = [split for split in around or () if split.fits(tensor)]
        if known and not any(split.fits_whole(tensor, self._group.size) for split in around or ()):
            return self._decided(tensor, known)
        return self._by_comparing(place, tensor, known)

    def _outside(self, place: Place, tensor: torch.Tensor) -> tuple[Layout | None, torch.Tensor]:
        """Where no module has cut anything that is still open."""
        if any(scope in self._summing for scope in _scopes(place.path)):
            return self._decided(tensor, [Summed()])
        known = [split for split in self._seen if split.fits(tensor)]
        if width_of(tensor) == self._width or not known:
            return None, tensor
        return self._by_comparing(place, tensor, known)  # something from inside that was handed out

    def _by_comparing(
        self, place: Place, tensor: torch.Tensor, known: list[Split]
    ) -> tuple[Layout | None, torch.Tensor]:
        """It is whole if the ranks have the same; if not, it lies as the one split that is ``known`` to fit."""
        parts = self._group.gather(tensor)
        equal = are_equal(parts)
        if equal and (not known or parts[0].any()):
            return None, tensor
        if equal or not known:
            raise LocationError(
                f"`{place}`: a tensor {tuple(tensor.shape)} here may lie in parts on {self._group.size} ranks, and it "
                f"can't be told how: read it at the modules before or after"
            )
        return _chosen(known, parts)

    def _decided(self, tensor: torch.Tensor, candidates: list[Any]) -> tuple[Layout | None, torch.Tensor]:
        candidates = [each for each in candidates if isinstance(each, Summed) or each.fits(tensor)]
        if not candidates:
            return None, tensor
        parts = self._group.gather(tensor)
        if isinstance(candidates[0], Summed) and are_equal(parts):
            return None, tensor  # somebody has added them up already
        return _chosen(candidates, parts)

    def _around(self, path: str) -> list[Split] | None:
        return next((self._open[scope] for scope in _scopes(path) if scope in self._open), None)


def _chosen(candidates: list[Any], parts: list[torch.Tensor]) -> tuple[Layout, torch.Tensor]:
    if len(candidates) > 1:
        # Queries and keys of one width: keys that ranks share are those on which they agree.
        shared = sorted(candidates, key=lambda split: -max(replicas for _, replicas in split.segments))
        candidates = [split for split in shared if split.agrees(parts)]
    return candidates[0], candidates[0].whole(parts)


def _scopes(path: str) -> Iterator[str]:
    """A path and those of the modules around it."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _unique(value: Any) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors_of(value)}.values())
