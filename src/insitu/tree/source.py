"""The operations in the Python forward of a module, as a block names them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from insitu.block import UnknownModuleError
from insitu.tree.call import Call
from insitu.tree.place import Place
from insitu.tree.session import current


@dataclass(frozen=True)
class Operation:
    """A call, or an operator between values, in the text of a function.

    ``loops``: it stands in a loop, so that one call of the function may come to it several times.
    """

    name: str
    line: int
    text: str
    loops: bool = False


@dataclass(frozen=True)
class Listing:
    """The text of a function, from line ``first`` of its file on, and the operations in it."""

    title: str
    first: int
    lines: tuple[str, ...]
    operations: tuple[Operation, ...]

    def find(self, name: str) -> Operation | None:
        return next((each for each in self.operations if each.name == name), None)

    def require(self, name: str, within: Place) -> Operation:
        """The operation; ``UnknownModuleError``, naming the nearest, if there is none of that name."""
        found = self.find(name)
        if found is not None:
            return found
        names = [each.name for each in self.operations]
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        hint = f"; the nearest is `{close[0]}`" if close else ""
        has = ", ".join(names) if names else "no operations"
        raise UnknownModuleError(f"`{within.call}.source` ({self.title}) has no operation `{name}`{hint}; it has {has}")

    def render(self) -> str:
        """The text with line numbers, and beside each line the names of its operations."""
        names: dict[int, list[str]] = {}
        for each in self.operations:
            names.setdefault(each.line, []).append(each.name)
        width = min(max(map(len, self.lines), default=0), 88)
        digits = len(str(self.first + len(self.lines)))
        shown = [self.title]
        for number, text in enumerate(self.lines, self.first):
            beside = f"  # {', '.join(names[number])}" if number in names else ""
            shown.append(f"{number:>{digits}}  {text:<{width}}{beside}".rstrip())
        return "\n".join(shown)


Lister = Callable[[str, str], "Listing | None"]


class Source:
    """The text of the function that a module or an operation runs; its attributes are the operations in it.

    ``print`` shows the text with the names. Raises ``LocationError`` where the text can't be had (code that
    is not Python), ``UnknownModuleError`` for an operation that is not in it.
    """

    __slots__ = ("_lister", "_op", "_path")

    def __init__(self, path: str, op: str, lister: Lister | None) -> None:
        self._path = path
        self._op = op
        self._lister = lister

    def __getattr__(self, name: str) -> OperationNode:
        if name.startswith("_"):
            raise AttributeError(name)
        listing = self._listing()
        if listing is not None:
            listing.require(name, Place(self._path, "", self._op))
        return OperationNode(self._path, f"{self._op}.{name}" if self._op else name, self._lister)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in Source.__slots__:
            raise AttributeError(
                f"`{self._name()}.{name}` can't be assigned: a block writes to places, such as "
                f"`{self._name()}.{name}.output = value`"
            )
        object.__setattr__(self, name, value)

    def __iter__(self) -> Iterator[OperationNode]:
        listing = self._listing()
        return (getattr(self, each.name) for each in (listing.operations if listing else ()))

    def __dir__(self) -> list[str]:
        listing = self._listing()
        return [each.name for each in listing.operations] if listing else []

    def __repr__(self) -> str:
        listing = self._listing()
        return f"<{self._name()}>" if listing is None else listing.render()

    def _listing(self) -> Listing | None:
        # A block may run where its client's way to the engine does not lead.
        session = current.get()
        if session is not None:
            return session.operations(self._path, self._op)
        return self._lister(self._path, self._op) if self._lister is not None else None

    def _name(self) -> str:
        return f"{Place(self._path, '', self._op).call}.source"


class OperationNode(Call):
    """One operation in the forward of a module, with the places that a module has.

    In a loop, the operation is passed several times in a step: a read serves the next time it is passed.
    """

    __slots__ = ("_lister", "_op", "_path")

    def __init__(self, path: str, op: str, lister: Lister | None) -> None:
        self._path = path
        self._op = op
        self._lister = lister

    @property
    def source(self) -> Source:
        """The operations in the function that this one calls."""
        return Source(self._path, self._op, self._lister)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in (*OperationNode.__slots__, "output", "input", "inputs"):
            raise AttributeError(f"`{self._place('').call}` has no place `{name}` to write to")
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"<operation {self._place('').call}>"
