"""Comparisons of what blocks have read: with transformers, with its parts, alone and in company."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from insitu.engine.check.reference import Values, key
from insitu.engine.check.report import Row
from insitu.run.standard_names import Name, Names

LOGITS: Name = ("logits", None)
UNEMBEDDED: Name = ("unembedded", None)
_EXACT = 1e-5


@dataclass
class Reading:
    """One prompt with the tokens that followed it, and what a block read of them: ``[tokens, width]`` by name,
    outputs of modules by path."""

    prompt: list[int]
    drawn: list[int]
    names: dict[Name, torch.Tensor] = field(default_factory=dict)
    modules: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.drawn[:-1]]

    @property
    def values(self) -> Iterator[tuple[str, int | None, torch.Tensor]]:
        """Place, layer, value."""
        for (name, layer), value in self.names.items():
            if (name, layer) != UNEMBEDDED:
                yield name, layer, value
        for path, value in self.modules.items():
            yield *_by_layer(path), value


class _Largest:
    """The largest difference seen at each place and layer, of all prompts."""

    def __init__(self) -> None:
        self.found: dict[Name, float] = {}

    def add(self, place: str, layer: int | None, difference: float) -> None:
        self.found[place, layer] = max(self.found.get((place, layer), 0.0), difference)

    def rows(self, check: str, bounds: Bounds) -> list[Row]:
        return [Row(check, *at, found, bounds.of(at), bounds.noise.get(at)) for at, found in self.found.items()]

    def __contains__(self, place: str) -> bool:
        return any(place == other for other, _ in self.found)


@dataclass(frozen=True)
class Bounds:
    """How large differences may be: ``rounding``, and twice the noise that was measured at the place."""

    rounding: float
    noise: Mapping[Name, float] = field(default_factory=dict)
    sides: int = 1
    """How many of the values compared have the error."""

    def of(self, at: Name) -> float:
        return self.sides * (self.rounding + 2 * self.noise.get(at, 0.0))


def rounding(dtype: torch.dtype) -> float:
    return _EXACT if dtype == torch.float32 else torch.finfo(dtype).eps


def difference(value: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference, relative to that of the value wanted; infinite where shapes differ.

    Norms, because the largest element of a rounding error is a matter of chance: in bfloat16 those of vLLM
    and transformers differed twofold where the norms differed by a fifth.
    """
    if value.shape != wanted.shape or not torch.isfinite(value).all():
        return float("inf")
    return ((value.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12)).item()


def with_transformers(
    readings: Sequence[Reading], values: Values, exact: str, own: str
) -> tuple[list[Row], dict[Name, float], list[str]]:
    """Rows; the error that transformers itself has by rounding; places that it has no counterpart of.

    ``exact`` and ``own``: the dtype that is taken for exact, and that of the engine.
    """
    found, errors = _Largest(), _Largest()
    missing: dict[str, None] = {}
    for number, reading in enumerate(readings):
        for place, layer, value in reading.values:
            name = _as_asked(place, layer)
            wanted = values.get(key(exact, number, *name))
            if wanted is None:
                missing[place] = None
                continue
            # Transformers gives the logits of every position.
            wanted = wanted[-len(value) :] if name == LOGITS else wanted
            found.add(place, layer, difference(value, wanted))
            if own != exact:
                errors.add(place, layer, difference(values[key(own, number, *name)][-len(wanted) :], wanted))
    rows = found.rows("transformers", Bounds(rounding(getattr(torch, own)), errors.found))
    return rows, errors.found, [place for place in missing if place not in found]


def in_company(alone: Sequence[Reading], company: Sequence[Reading], bounds: Bounds) -> list[Row]:
    found = _Largest()
    for one, other in zip(alone, company, strict=True):
        for (place, layer, value), (_, _, again) in zip(one.values, other.values, strict=True):
            found.add(place, layer, difference(again, value))
    return found.rows("company", bounds)


def finite_and_not_zero(readings: Sequence[Reading]) -> list[Row]:
    found = _Largest()
    for reading in readings:
        for place, layer, value in reading.values:
            wrong = not torch.isfinite(value).all() or not value.any()
            found.add(place, layer, float("inf") if wrong else 0.0)
    return found.rows("values", Bounds(0.0))


def with_parts(names: Names, readings: Sequence[Reading], dtype: torch.dtype) -> list[Row]:
    """What is added up to a stream is that stream, one layer's end is the next one's beginning, the normed
    stream unembedded gives the logits, and values weighted by the pattern are what attention returns."""
    found = _Largest()
    for reading in readings:
        for place, layer, value, wanted in (*_identities(names, reading.names), *_weighted_values(names, reading)):
            found.add(place, layer, difference(value, wanted))
    return found.rows("sum", Bounds(4 * rounding(dtype)))


Identity = tuple[str, int | None, torch.Tensor, torch.Tensor]


def _identities(names: Names, values: dict[Name, torch.Tensor]) -> Iterable[Identity]:
    layers = [layer for name, layer in values if name == "resid_post" and layer is not None]
    for i in sorted(layers):
        before, attn_out, mlp_out, after = (
            values.get((name, i)) for name in ("resid_pre", "attn_out", "mlp_out", "resid_post")
        )
        if before is None or attn_out is None or mlp_out is None or after is None:
            continue
        middle = values.get(("resid_mid", i))
        if middle is not None:
            yield "resid_mid", i, before + attn_out, middle
            yield "resid_post", i, middle + mlp_out, after
        elif "resid_pre + attn_out + mlp_out = resid_post" in names.absent.get(("resid_mid", i), ""):
            yield "resid_post", i, before + attn_out + mlp_out, after
        following = values.get(("resid_pre", i + 1))
        if following is not None:
            yield "resid_pre", i + 1, after, following
    unembedded = values.get(UNEMBEDDED)
    if unembedded is not None:
        yield "logits", None, unembedded, values[LOGITS]


def _weighted_values(names: Names, reading: Reading) -> Iterable[Identity]:
    for (name, layer), pattern in reading.names.items():
        if name == "attn_pattern":
            v = reading.names["v", layer].float()
            repeated = v.repeat_interleave(pattern.shape[1] // v.shape[1], 1)
            returned = reading.modules[names.computed[name, layer].place.path]
            yield name, layer, torch.einsum("qhk,khd->qhd", pattern, repeated).flatten(1), returned.float()


def _by_layer(path: str) -> tuple[str, int | None]:
    """``model.layers.3.mlp`` as ``model.layers.*.mlp.output`` and 3."""
    numbered = re.search(r"\.(\d+)\.", path)
    if numbered is None:
        return f"{path}.output", None
    return f"{path[: numbered.start()]}.*.{path[numbered.end() :]}.output", int(numbered[1])


def _as_asked(place: str, layer: int | None) -> Name:
    """The name under which transformers' value was asked for."""
    if not place.endswith(".output"):
        return place, layer
    return f"module:{place.removesuffix('.output').replace('*', str(layer))}", None
