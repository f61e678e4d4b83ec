"""The self-test of taps: the same tokens once through eager steps and once through the taps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from insitu.block import LocationError
from insitu.engine.client.trace import Trace
from insitu.tree import SAMPLES, Place, session_for

if TYPE_CHECKING:
    from insitu.engine.client.engine import Engine
    from insitu.run import Cache

_PROMPT, _STEPS = (1, 2, 3, 4, 5, 6), 3
_BOUND = 0.25
"""Of the difference, by norm and relative: far above rounding through many layers, far below anything else."""

Values = dict[Place, list[torch.Tensor]]


def check_taps(engine: Engine, lock: threading.RLock) -> None:
    """Raises ``LocationError``, by name, for a tap that gives zeros or the values of another place."""
    places = list(engine.taps())
    eager = _read(engine, lock, places, through_taps=False)
    tapped = _read(engine, lock, places, through_taps=True)
    for place, passed in engine.taps().items():
        if not passed or place not in eager:
            raise LocationError(f"taps: `{place}` is not in the model's forward, which never came to it")
        _require_alike(place, tapped[place], eager)


def _read(engine: Engine, lock: threading.RLock, places: Sequence[Place], through_taps: bool) -> Values:
    def block(tracer: Trace) -> list[tuple[str, Cache]]:
        caches = [
            (site, tracer.cache(paths, inputs=site == "input", outputs=site == "output"))
            for site in ("input", "output")
            if (paths := [place.path for place in places if place.site == site])
        ]
        for _ in tracer.iter[:]:
            session_for("a tap").read(SAMPLES)[:] = _PROMPT[0]  # the same tokens, whatever the rounding
        return caches

    settings = {"temperature": 0.0, "max_tokens": _STEPS, "ignore_eos": True, "detokenize": False}
    engine.use_taps(through_taps)
    try:
        returned, error = Trace(engine, lock, [list(_PROMPT)], settings).run_function(block)
    finally:
        engine.use_taps(True)
    if error is not None:
        raise error
    return {
        Place(path, site): [_joined(value) for value in _visits(getattr(cache[path], site + "s" * (site == "input")))]
        for site, cache in returned[0]
        for path in cache
    }


def _visits(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _joined(value: Any) -> torch.Tensor:
    """All floating tensors of a value in one."""
    from insitu.run.structure import tensors_in

    found = [tensor.float().flatten() for tensor in tensors_in(value).floating]
    return torch.cat(found) if found else torch.zeros(0)


def _require_alike(place: Place, tapped: list[torch.Tensor], eager: Values) -> None:
    for step, (value, wanted) in enumerate(zip(tapped, eager[place], strict=True)):
        own = _difference(value, wanted)
        if own is None or own == 0:
            continue
        others = {other: _difference(value, values[step]) for other, values in eager.items() if len(values) > step}
        near = min((other for other in others if others[other] is not None), key=lambda other: others[other] or 0.0)
        elsewhere = near != place and (others[near] or 0.0) < own / 4
        if own > _BOUND or elsewhere:
            what = "zeros" if not value.any() else f"what is at `{near}`" if elsewhere else "other values"
            raise LocationError(
                f"taps: the tap of `{place}` gives {what} in step {step} (by norm, off by {own:.2g} of what an eager "
                f"step gives): leave it out of taps, and its place is served by eager steps"
            )


def _difference(value: torch.Tensor, wanted: torch.Tensor) -> float | None:
    size = wanted.norm().item()
    if value.shape != wanted.shape or not size > 0:
        return None
    return ((value - wanted).norm() / size).item()
