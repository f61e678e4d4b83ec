"""What ``taps=`` names: places of modules by pattern, and standard names."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from insitu.block import LocationError, SharedModuleError
from insitu.run.anatomy import Anatomy
from insitu.run.modules import ModuleTable
from insitu.tree import Named, Place, named


def places_of(names: Sequence[str], modules: ModuleTable, anatomy: Anatomy) -> list[Place]:
    """The places that taps are for, each once. A module's are named ``path.output`` or ``path.input``.

    Raises ``UnknownModuleError`` for a pattern that means nothing here, ``LocationError`` for a place
    that a tap can't serve, ``ArgumentError`` for what names no place.
    """
    meant = named(names, "taps", anatomy.layers, modules.outline())
    places = dict.fromkeys(_place(one, anatomy) for one in meant)
    for place in places:
        _require_tappable(place, modules)
    return list(places)


def _place(one: Named, anatomy: Anatomy) -> Place:
    return anatomy.stream(one.stream, one.layer).place if one.stream else one.place


def _require_tappable(place: Place, modules: ModuleTable) -> None:
    module = modules[place.path]
    if modules.is_shared(place.path):
        paths = ", ".join(modules.paths_of(module)[:3])
        raise SharedModuleError(
            f"taps: `{place}` can't be told from others, one module serves {paths}: tap a module around it"
        )
    if type(module).__call__ is not torch.nn.Module.__call__:
        raise LocationError(
            f"taps: `{place}` is where compiled code begins and ends; tap a module inside `{place.path}`"
        )
