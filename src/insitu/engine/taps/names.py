"""What ``taps=`` names: places of modules by pattern, and standard names."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from insitu.block import ArgumentError, LocationError, SharedModuleError
from insitu.run.anatomy import Anatomy
from insitu.run.modules import ModuleTable
from insitu.run.standard_names import OF_LAYER, OF_MODEL
from insitu.tree import Place, matching

_STANDARD = re.compile(r"(?:model\.)?(\w+)(?:\[(-?\d*)(:?)(-?\d*)\])?")


def places_of(names: Sequence[str], modules: ModuleTable, anatomy: Anatomy) -> list[Place]:
    """The places that taps are for, each once. A module's are named ``path.output`` or ``path.input``.

    Raises ``UnknownModuleError`` for a pattern that means nothing here, ``LocationError`` for a place
    that a tap can't serve, ``ArgumentError`` for what names no place.
    """
    places = dict.fromkeys(place for name in names for place in _meant(name, modules, anatomy))
    for place in places:
        _require_tappable(place, modules)
    return list(places)


def _meant(name: str, modules: ModuleTable, anatomy: Anatomy) -> list[Place]:
    standard = _STANDARD.fullmatch(name)
    if standard and standard[1] in (*OF_LAYER, *OF_MODEL):
        return _streams(name, standard, anatomy)
    path, _, site = name.rpartition(".")
    if site not in ("input", "inputs", "output") or not path:
        raise ArgumentError(
            f"taps: `{name}` names no place; give a module's (`model.layers.*.output`, `.input`) or a standard name "
            f"(`resid_post`, `resid_post[3]`, `resid_post[4:8]`)"
        )
    return [Place(each, site.removesuffix("s")) for each in matching(path, modules.outline())]


def _streams(name: str, match: re.Match[str], anatomy: Anatomy) -> list[Place]:
    stream, first, colon, last = match.groups()
    if stream in OF_MODEL:
        if first is not None:
            raise ArgumentError(f"taps: `{name}`: {stream} is of the whole model, without an index")
        return [anatomy.stream(stream).place]
    layers = range(anatomy.layers)
    if first is None:
        chosen = layers
    elif colon:
        chosen = layers[int(first) if first else None : int(last) if last else None]
    elif first and not last and -len(layers) <= int(first) < len(layers):
        chosen = [layers[int(first)]]
    else:
        chosen = []
    if not chosen:
        anatomy.stream(stream, 0)  # if it is not known at all, that is to be said
        raise ArgumentError(f"taps: `{name}` means no layer; this model has layers 0 to {len(layers) - 1}")
    return [anatomy.stream(stream, layer).place for layer in chosen]


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
