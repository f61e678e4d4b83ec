"""Recorded values of many modules. Knows neither torch nor files."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, overload

from insitu.block import LocationError, UnknownModuleError
from insitu.tree.call import first_argument
from insitu.tree.node import Node, path_of
from insitu.tree.outline import join
from insitu.tree.place import Place

T = TypeVar("T")
C = TypeVar("C", bound="Cache")
_SHOWN = 16


class Visit(NamedTuple):
    """One value that was recorded, and the step in which the model came by."""

    step: int
    value: Any


class Records:
    """The visits of a cache by place, and the tree of the modules in it."""

    def __init__(self, lists: Mapping[str, int]) -> None:
        self.lists: dict[str, int] = dict(lists)
        self.paths: dict[str, None] = {}
        self.visits: dict[Place, list[Visit]] = {}

    def add(self, place: Place, step: int, value: Any) -> None:
        self.paths[place.path] = None
        self.visits.setdefault(place, []).append(Visit(step, value))

    def drop(self, step: int) -> None:
        for visits in self.visits.values():
            while visits and visits[-1].step == step:
                visits.pop()

    def at(self, place: Place) -> list[Visit]:
        if found := self.visits.get(place):
            return found
        there = [str(other) for other in self.visits if other.path == place.path]
        why = f"this cache has `{there[0]}` alone" if there else "not asked for, or not called by the model"
        raise LocationError(f"`{place}` was not recorded: {why} (tracer.cache takes modules, inputs and outputs)")

    def children(self, path: str) -> list[str]:
        prefix = f"{path}." if path else ""
        below = (each[len(prefix) :] for each in self.paths if each.startswith(prefix))
        return list(dict.fromkeys(each.partition(".")[0] for each in below))

    def below(self, path: str, name: str) -> Cached:
        children = self.children(path)
        if name not in children:
            has = f"here it has {', '.join(children)}" if children else "it has nothing below this one"
            raise UnknownModuleError(f"this cache has no module `{join(path, name)}`; {has}")
        return Cached(self, join(path, name))


class Cache(Mapping[str, "Cached"]):
    """Recorded values by module: ``cache["model.layers.3"].output``, ``cache.model.layers[3].output``.

    A mapping from the paths of the modules that the model called, in the order in which it first came to
    them, to their values; nodes are taken for paths.
    """

    def __init__(self, records: Records) -> None:
        self._records = records

    def save(self) -> Cache:
        """Allowed, and needless: a cache comes home under each name of the block that holds it."""
        return self

    # -- by path --------------------------------------------------------------------------

    def __getitem__(self, module: str | Node) -> Cached:
        path, known = _path(module), self._records.paths
        if path not in known:
            near = difflib.get_close_matches(str(path), known, n=1)
            hint = f"; the nearest that is: `{near[0]}`" if near else ""
            raise KeyError(f"`{path}` is not in this cache: not asked for, or not called by the model{hint}")
        return Cached(self._records, path)

    def __iter__(self) -> Iterator[str]:
        return iter(self._records.paths)

    def __len__(self) -> int:
        return len(self._records.paths)

    def __contains__(self, module: object) -> bool:
        return _path(module) in self._records.paths

    def __getattr__(self, name: str) -> Cached:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._records.below("", name)

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *self._records.children("")]

    # Two caches are equal if they are the same one: tensors can't be compared with ==.

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        lines = [f"  {cached!r}" for cached in self.values()]
        title = f"Cache of {len(lines)} module{'' if len(lines) == 1 else 's'}"
        if len(lines) > _SHOWN:
            lines[_SHOWN - 2 : -1] = [f"  ... {len(lines) - _SHOWN + 1} more"]
        return "\n".join([title, *lines])

    # -- as data --------------------------------------------------------------------------

    def as_data(self) -> dict[str, Any]:
        """All that is in it, as lists and dicts; ``from_data`` makes an equal one of it."""
        visits = [[*place, visit.step, visit.value] for place, all in self._records.visits.items() for visit in all]
        return {"lists": self._records.lists, "visits": visits}

    @classmethod
    def from_data(cls: type[C], data: Mapping[str, Any]) -> C:
        """The cache that ``as_data`` said it was. Raises ``TypeError`` or ``ValueError`` for what is none."""
        records = Records({_checked(str, path): _checked(int, length) for path, length in data["lists"].items()})
        for path, site, op, step, value in data["visits"]:
            place = Place(_checked(str, path), _checked(str, site), _checked(str, op))
            records.add(place, _checked(int, step), value)
        return cls(records)


class Cached:
    """One module of a cache; attributes and indices lead to the modules below it."""

    __slots__ = ("_path", "_records")

    def __init__(self, records: Records, path: str) -> None:
        self._records = records
        self._path = path

    @property
    def output(self) -> Any:
        """What the module returned; where it was visited several times, a list over the visits."""
        return _one_or_list([visit.value for visit in self._visits("output")])

    @property
    def inputs(self) -> Any:
        """What it was called with, ``(args, kwargs)``; a list over the visits where there were several."""
        return _one_or_list([visit.value for visit in self._visits("input")])

    @property
    def input(self) -> Any:
        """The first argument that it was called with; a list over the visits where there were several."""
        return _one_or_list([first_argument(visit.value) for visit in self._visits("input")])

    @property
    def steps(self) -> list[int]:
        """The step of each visit; 0 is the prefill."""
        sites = (self._records.visits.get(Place(self._path, site)) for site in ("output", "input"))
        return [visit.step for visit in next(filter(None, sites), [])]

    def __getattr__(self, name: str) -> Cached:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._records.below(self._path, name)

    @overload
    def __getitem__(self, index: int) -> Cached: ...
    @overload
    def __getitem__(self, index: slice) -> list[Cached]: ...
    def __getitem__(self, index: int | slice) -> Cached | list[Cached]:
        length = self._records.lists.get(self._path, 0)
        if isinstance(index, slice):
            there = self._records.children(self._path)
            return [self[i] for i in range(*index.indices(length)) if str(i) in there]
        if not -length <= index < length:
            raise IndexError(f"`{self._path}` has {length} modules; got index {index}")
        return self._records.below(self._path, str(index % length))

    def __iter__(self) -> Iterator[Cached]:
        return iter(self[:])

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *self._records.children(self._path)]

    def __repr__(self) -> str:
        found = []
        for site in ("input", "output"):
            if visits := self._records.visits.get(Place(self._path, site)):
                found.append(f"{site} {_described(visits[0].value)}")
        more = len(self.steps) - 1
        return f"{self._path}: {'; '.join(found) or 'not recorded'}{f' and {more} more' if more > 0 else ''}"

    def _visits(self, site: str) -> list[Visit]:
        return self._records.at(Place(self._path, site))


def _path(module: object) -> Any:
    return path_of(module) if isinstance(module, Node) else module


def _checked(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} is wanted")
    return value


def _one_or_list(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _described(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_described, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_described(part)}' for key, part in value.items())}}}"
    return repr(value)
