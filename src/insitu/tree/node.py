"""Nodes: a model's modules as a block names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, overload

from insitu.block import OutsideTraceError
from insitu.tree.call import Call
from insitu.tree.outline import Outline, join
from insitu.tree.session import session_for
from insitu.tree.source import Lister, Source

_set = object.__setattr__  # past what a node says of assignments
_ACCESSORS = ("output", "input", "inputs", "skip", "source", "next", "get")


class Node(Call):
    """A module of the model, known by its path.

    Attributes are its submodules, and an index picks from a list of them. A submodule whose
    name is taken here (``output``, say) is reached with ``node.get("output")``.

    Raises ``UnknownModuleError`` for a path that the model does not have, as soon as the
    model's outline is known.
    """

    __slots__ = ("_lister", "_outline", "_path")
    _op = ""

    def __init__(self, path: str, outline: Callable[[], Outline | None], lister: Lister | None = None) -> None:
        _set(self, "_path", path)
        _set(self, "_outline", outline)
        _set(self, "_lister", lister)

    # -- the forward ----------------------------------------------------------------------

    @property
    def source(self) -> Source:
        """The operations in the module's Python ``forward``: ``print(module.source)`` lists them."""
        return Source(self._path, "", self._lister)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Applies the real module to values of the block; fires no places."""
        return session_for(f"calling `{self._path}`", self._lister).call(self._path, args, kwargs)

    def next(self) -> Node:
        """Moves the block on to the next step; returns this module, so that its places can follow."""
        session_for(f"`{join(self._path, 'next()')}`", self._lister).move_on()
        return self

    # -- the tree -------------------------------------------------------------------------

    def get(self, path: str) -> Node:
        """The module at a dotted path below this one."""
        return self._child(path)

    def __getattr__(self, name: str) -> Node:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._child(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Node.__slots__ or name in _ACCESSORS:
            object.__setattr__(self, name, value)
            return
        raise AttributeError(
            f"`{self._path or 'model'}.{name}` can't be assigned: a block writes to places, such as "
            f"`{join(self._path, name)}.output = value`"
        )

    @overload
    def __getitem__(self, index: int) -> Node: ...
    @overload
    def __getitem__(self, index: slice) -> list[Node]: ...
    def __getitem__(self, index: int | slice) -> Node | list[Node]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            if index < -len(self):
                raise IndexError(f"`{self._path}` has {len(self)} modules, 0 to {len(self) - 1}; got {index}")
            index += len(self)
        return self._child(str(index))

    def __len__(self) -> int:
        return sum(name.isdigit() for name in self._known(f"len({self._path})").children(self._path))

    def __iter__(self) -> Iterator[Node]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        return True

    def __dir__(self) -> list[str]:
        outline = self._outline()
        names = outline.children(self._path) if outline else ()
        return [*_ACCESSORS, *(name for name in names if name.isidentifier())]

    def __repr__(self) -> str:
        outline = self._outline()
        if outline is None:
            return f"<module {self._path}>"
        return outline.render(self._path, self._path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and (self._path, self._outline) == (other._path, other._outline)

    def __hash__(self) -> int:
        return hash(self._path)

    def _child(self, name: str) -> Node:
        path = join(self._path, name)
        outline = self._outline()
        if outline is not None:
            outline.require(path)
        return Node(path, self._outline, self._lister)

    def _known(self, what: str) -> Outline:
        outline = self._outline()
        if outline is None:
            raise OutsideTraceError(f"{what} is known once the engine runs: call model.dispatch() first")
        return outline


def path_of(node: Node) -> str:
    return node._path
