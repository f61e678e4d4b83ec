"""Names of many modules at once: patterns over the paths of a model."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from insitu.block import ArgumentError, UnknownModuleError
from insitu.tree.node import Node, path_of
from insitu.tree.outline import Outline


def matching(modules: Any, outline: Outline) -> list[str]:
    """Paths of the modules that ``modules`` means, each once, in the model's own order; ``None``: all.

    ``modules`` is a name, a node, a pattern, or a list mixing them. In a pattern, ``*`` stands for one
    segment of a path (or for a part of one, as in ``*_proj``) and ``**`` for any number of segments.

    Raises ``UnknownModuleError``, naming the nearest, for one that means no module of this model, and
    ``ArgumentError`` for what is none of these.
    """
    if modules is None:
        return [path for path in outline.modules if path]
    wanted = {path for one in _flat(modules) for path in _paths(one, outline)}
    if not wanted:
        raise ArgumentError("no modules are named by an empty list; leave it out for all of them")
    return [path for path in outline.modules if path in wanted]


def _flat(modules: Any) -> Iterator[str | Node]:
    if isinstance(modules, (str, Node)):
        yield modules
    elif isinstance(modules, (list, tuple, set, frozenset)):
        for one in modules:
            yield from _flat(one)
    else:
        raise ArgumentError(
            f"modules are given by names (patterns with `*` and `**` too), nodes or a list of them; "
            f"got {type(modules).__name__} {modules!r:.60}"
        )


def _paths(one: str | Node, outline: Outline) -> list[str]:
    name = path_of(one) if isinstance(one, Node) else one
    if "*" not in name:
        outline.require(name)
        _require_called(name, outline)
        return [name]
    segments = name.split(".")
    found = [path for path in outline.modules if path and _fits(segments, path.split("."))]
    if not found:
        raise UnknownModuleError(f"no module of this model is meant by `{name}`{_nearest(name, outline)}")
    return found


def _require_called(path: str, outline: Outline) -> None:
    module = outline.modules[path]
    if path and module.kind != "ModuleList":
        return
    if not path:
        raise ArgumentError("the whole model is named by its modules: `model.**`, or leave modules out")
    raise ArgumentError(f"`{path}` is a list, which the model does not call: `{path}.*` means the modules in it")


def _fits(pattern: list[str], path: list[str]) -> bool:
    """Whether a pattern means a path. Whatever a block from the network asks for, it takes no long time."""
    reached = {0}
    for segment in pattern:
        if segment == "**":
            reached = set(range(min(reached), len(path) + 1))
        else:
            reached = {at + 1 for at in reached if at < len(path) and _fits_segment(segment, path[at])}
        if not reached:
            return False
    return len(path) in reached


def _fits_segment(pattern: str, text: str) -> bool:
    first, *others = pattern.split("*")
    if not others:
        return pattern == text
    *middle, last = others
    end = len(text) - len(last)
    if not text.startswith(first) or not text.endswith(last) or end < len(first):
        return False
    at = len(first)
    for part in middle:
        found = text.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


def _nearest(pattern: str, outline: Outline) -> str:
    """The nearest pattern that means something: paths with ``*`` for numbers, or ``**`` and a last name."""
    known: dict[str, None] = {}
    for path in filter(None, outline.modules):
        segments = path.split(".")
        known[".".join("*" if segment.isdigit() else segment for segment in segments)] = None
        known[f"**.{segments[-1]}"] = None
        known[path] = None
    near = difflib.get_close_matches(pattern, known, n=1, cutoff=0.5)
    return f"; the nearest is `{near[0]}`" if near else "; see print(model)"
