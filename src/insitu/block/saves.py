"""What a running block has saved."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType, ModuleType
from typing import Any, TypeVar
from weakref import ref

from .errors import ArgumentError, OutsideTraceError
from .lost import Line, Lost, Unnamed, line_of

__all__ = ["SAVE_NAME", "Saves", "current_saves", "hint_at_save", "save"]

T = TypeVar("T")

SAVE_NAME = "__insitu_save__"
"""Name under which a block's code finds `Saves.mark`. Ends in underscores, so that no class mangles it."""

_PACKAGE = __name__.partition(".")[0]

# Python makes one object of many equal values of these types, so that identity says little about them.
_SCALARS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))

current_saves: ContextVar[Saves | None] = ContextVar("current_saves", default=None)


def save(value: T) -> T:
    """Save `value` from a helper function that a block calls, and return it.

    In the block's own text write `value.save()`, which also says under which name. What is saved here comes
    back under every name of the block that holds this very object when the block ends. Raises
    `ArgumentError` for a number, a text and the like, which can't be told from others that are equal.
    """
    saves = current_saves.get()
    if saves is None:
        raise OutsideTraceError(
            "insitu.save(x) was called where no trace block is running: call it in the block, or in a "
            "function that the block calls"
        )
    if isinstance(value, _SCALARS):
        raise ArgumentError(
            f"insitu.save({value!r}) can't tell under which name: twice the same number or text is one object to "
            f"Python. Write `name = x.save()` in the block's own text"
        )
    saves.keep(value, frame=sys._getframe(1))
    return value


def hint_at_save(error: BaseException) -> None:
    """Says what to write instead in the error of a block that asked for `x.save()` in a function."""
    if isinstance(error, AttributeError) and error.name == "save" and sys.version_info >= (3, 11):
        error.add_note("In a function there is no x.save(): return the value, or write insitu.save(x).")


class Saves:
    """The values and names that one run of a block has saved.

    It keeps no tensor alive: what the block itself lets go of, as when a loop saves under the same name at
    each step, is gone.
    """

    def __init__(self) -> None:
        self._marked = _Objects()
        self._named: dict[str, Line | None] = {}
        self._unnamed = Unnamed()

    @property
    def names(self) -> tuple[str, ...]:
        """Names saved by name, in the order in which they first were."""
        return tuple(self._named)

    def __contains__(self, value: object) -> bool:
        """Whether this very object was saved."""
        return value in self._marked

    def mark(self, value: Any, *names: str) -> Any:
        """What `value.save()` in a block's text stands for; `names` are those the statement gives to it.

        A value that has a method `save` of its own has that called instead.
        """
        return value.save() if _has_own_save(value) else self.keep(value, *names, frame=sys._getframe(1))

    def keep(self, value: Any, *names: str, frame: FrameType | None = None) -> Any:
        """Save a value, under names or as the object that it is; returns it. `frame`: the code that asks for it.

        Raises `ArgumentError` for what only stands for values, which says so in a method `_unsavable`.
        """
        if (why := getattr(type(value), "_unsavable", None)) is not None:
            raise ArgumentError(why(value))
        self._marked.add(value, names)
        if names:
            self._named.update(dict.fromkeys(names, line_of(frame)))
        else:
            self._unnamed.add(value, frame)
        return value

    def collect(self, namespace: Mapping[str, Any], binds: Iterable[str]) -> dict[str, Any]:
        """Saved values by name, as they are now, which is meant to be the end of the block.

        A name saved by name comes with what it holds now. So does each of `binds` that holds a saved object,
        unless that is a number, a string or the like (twice the same number is one object to Python).
        """
        found = {name: namespace[name] for name in self._named if name in namespace}
        for name in sorted(binds):
            if name not in found and name in namespace and self._is_marked(namespace[name]):
                found[name] = namespace[name]
        return found

    def lost(self, namespace: Mapping[str, Any], home: Iterable[str]) -> list[Lost]:
        """Lines that saved a value which comes home under none of the names `home`."""
        gone = [(name, line) for name, line in self._named.items() if line and name not in namespace]
        return [*self._unnamed.lost(namespace, home), *(Lost(*line, None, name) for name, line in gone)]

    def all_home(self, namespace: Mapping[str, Any], home: Iterable[str]) -> bool:
        """Whether some value of each line that saves one comes home under the names `home`."""
        return self._unnamed.all_home(namespace, home)

    def _is_marked(self, value: object) -> bool:
        return value in self._marked and not isinstance(value, _SCALARS)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make these the ones that `insitu.save` adds to. `Block.execute` does so by itself."""
        token = current_saves.set(self)
        try:
            yield
        finally:
            current_saves.reset(token)


class _Objects:
    """Objects by identity, held weakly where that can be done, so that no id is taken for that of another."""

    def __init__(self) -> None:
        self._weak: dict[int, ref[Any]] = {}
        self._held: dict[int, Any] = {}
        self._held_for: dict[tuple[str, ...], int] = {}

    def add(self, value: object, names: tuple[str, ...]) -> None:
        """Add it; a list or the like takes the place of what was added under the same names before."""
        try:
            self._weak[id(value)] = ref(value)
        except TypeError:
            if names:
                self._held.pop(self._held_for.get(names, -1), None)
                self._held_for[names] = id(value)
            self._held[id(value)] = value

    def __contains__(self, value: object) -> bool:
        held = self._weak.get(id(value))
        return held() is value if held is not None else self._held.get(id(value), self) is value


def _has_own_save(value: object) -> bool:
    method = getattr(type(value), "save", None)
    if method is None:
        if isinstance(value, (type, ModuleType)):
            return hasattr(value, "save")
        return "save" in getattr(value, "__dict__", ())
    return callable(method) and not (getattr(method, "__module__", None) or "").startswith(_PACKAGE + ".")
