"""Whether a parsed source is what running code was compiled from."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import CodeType

from .constants import same_constant
from .locate import Place
from .resemble import looks_like
from .source import Source, compiled, future_flags

__all__ = ["compiles_to", "is_source_of"]


def is_source_of(source: Source, place: Place, code: CodeType) -> bool:
    """Whether `code`, which is entering a `with`, came from `source`, where `place` is that `with`.

    True if compiling the source again gives the same code. Where the code may have come from a rewritten tree
    (pytest's assertions, a notebook's statements one by one) names and constants are compared instead.
    """
    if source.certain or compiles_to(source.tree, code):
        return True
    return source.rewritten and looks_like(place, source.tree, code)


def compiles_to(tree: ast.Module, code: CodeType) -> bool:
    """Whether `code` is among what the text of a file compiles to."""
    # All of it is compiled: what a module imports changes the code of its functions.
    fresh = compiled(tree, code.co_filename, future_flags(code))
    return fresh is not None and any(_same_code(candidate, code) for candidate in _all_code(fresh))


def _all_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all_code(constant)


def _same_code(one: CodeType, other: CodeType) -> bool:
    return (
        one.co_code == other.co_code
        and one.co_firstlineno == other.co_firstlineno
        and one.co_name == other.co_name
        and one.co_names == other.co_names
        and one.co_varnames == other.co_varnames
        and one.co_freevars == other.co_freevars
        and one.co_cellvars == other.co_cellvars
        and list(one.co_lines()) == list(other.co_lines())
        and len(one.co_consts) == len(other.co_consts)
        and all(map(_same, one.co_consts, other.co_consts))
    )


def _same(one: object, other: object) -> bool:
    if isinstance(one, CodeType) and isinstance(other, CodeType):
        return _same_code(one, other)
    return same_constant(one, other)
