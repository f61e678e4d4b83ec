"""A piece of the user's code as data: captured in one place, run in another."""

from __future__ import annotations

import ast
import builtins
import hashlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from .locate import Place
from .lost import Lost
from .marks import saved_within
from .names import binds, reads
from .refuse import refuse
from .rewrite import rewritten
from .saves import SAVE_NAME, Saves, current_saves
from .source import compile_quietly, register
from .supers import first_argument
from .walk import clone

__all__ = ["Block", "SentOnce"]


class SentOnce:
    """A block that workers keep, and know by its ``digest`` from then on; one whose digest is empty they don't."""

    digest: str


@dataclass(frozen=True, eq=False)
class Block(SentOnce):
    """The body of a `with` statement, ready to run anywhere.

    It runs as module-level code with one dict for all its names, so that lambdas, comprehensions, functions
    and classes in it see them. `global x` and `nonlocal x` in it mean the block's own `x`. Blocks with equal
    digests are equal: same code, from the same lines of the same file.
    """

    filename: str
    lineno: int
    """Line of the `with`."""
    name: str
    """Name of the function around it, which tracebacks show."""
    qualname: str
    tree: ast.Module
    """The rewritten body. Don't change it."""
    flags: int = 0
    """Compiler flags of the `from __future__` imports it was written under."""
    code: CodeType = field(init=False, repr=False)
    digest: str = field(init=False)
    reads: frozenset[str] = field(init=False)
    """Names it may need from outside. Builtins are among them."""
    binds: frozenset[str] = field(init=False)
    """Names it may bind or delete."""

    def __post_init__(self) -> None:
        code = compile_quietly(self.tree, self.filename, self.flags)
        names: dict[str, Any] = {"co_name": self.name}
        if sys.version_info >= (3, 11):
            names["co_qualname"] = self.qualname
        code = code.replace(**names)
        register(code, self.tree)
        for attribute, value in (
            ("code", code),
            ("digest", self._digest()),
            ("reads", reads(code) - {SAVE_NAME}),
            ("binds", binds(code)),
        ):
            object.__setattr__(self, attribute, value)

    @classmethod
    def of_with(cls, place: Place, filename: str, name: str, qualname: str, flags: int = 0) -> Block:
        """The block of a `with` item: the items after it and the body. Refuses what a block can't hold."""
        node = clone(place.node)
        body = node.body
        rest = node.items[place.item + 1 :]
        if rest:
            inner = type(node)(rest, body)  # type: ignore[call-arg]
            body = [ast.copy_location(inner, node)]
        refuse(body, filename)
        tree = rewritten(body, place.class_name, first_argument(place.function))
        return cls(filename, place.node.lineno, name, qualname, tree, flags)

    def run(self, values: Mapping[str, object], saves: Saves, module_name: str) -> dict[str, Any]:
        """Run with these values for the names it reads; returns all names it has at the end."""
        namespace = self.namespace(values, saves, module_name)
        self.execute(namespace)
        return namespace

    def namespace(self, values: Mapping[str, object], saves: Saves, module_name: str) -> dict[str, Any]:
        """The dict that holds the block's names while it runs."""
        return {"__builtins__": builtins, "__name__": module_name, **values, SAVE_NAME: saves.mark}

    def execute(self, namespace: dict[str, Any]) -> None:
        """Run in a dict made by `namespace`. What the block raises is raised."""
        token = current_saves.set(namespace[SAVE_NAME].__self__)
        try:
            exec(self.code, namespace)
        finally:
            current_saves.reset(token)

    def lost(self, saves: Saves, namespace: Mapping[str, Any], home: Iterable[str]) -> list[Lost]:
        """What a run of it saved and what comes home under none of the names `home`."""
        found = saves.lost(namespace, home)
        within = saved_within(self.tree) if found else frozenset()
        return [
            each
            for each in found
            if each.holder or each.deleted or each.filename != self.filename or each.lineno not in within
        ]

    def _digest(self) -> str:
        parts = (
            ast.dump(self.tree, include_attributes=True),
            self.filename,
            self.qualname,
            self.flags,
            sys.version_info[:2],
        )
        return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Block) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[type[Block], tuple[Any, ...]]:
        return (Block, (self.filename, self.lineno, self.name, self.qualname, self.tree, self.flags))
