"""Edits that do the same to every row of every step, as far as their text tells.

Of such an edit it makes no difference whether a request's rows come in one step or in several, or were computed
for another request with the same edits and taken from the cache. All else is taken to depend on which rows it sees.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from insitu.block import Block
from insitu.block.reached import reached
from insitu.tree import ModelPlaces, Node

_STREAMS = {"resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"}
_WHOLE = {"embed", "pos_embed", "final_norm", "logits"}
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div)


class OtherwiseError(Exception):
    """The text holds something else."""


def does_same_to_rows(block: Block, values: Mapping[str, Any]) -> bool:
    """Whether a block is a loop over all steps in which places are edited with numbers and vectors, and with
    nothing that depends on the request. ``values``: what it reads of its caller."""
    reader = _Reader({name: value for name, value in values.items() if name not in block.binds})
    try:
        for statement in block.tree.body:
            reader.outside(statement)
    except OtherwiseError:
        return False
    return reader.loops > 0


def with_own_tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with tensors of their own, as a worker in another process has them. Containers that functions among
    them use too are left as they are."""
    memo = reached(values.values())
    return {name: _own(value, memo) for name, value in values.items()}


def _own(value: Any, memo: dict[int, Any]) -> Any:
    """``memo``: what stands for an object, by its id."""
    if id(value) in memo:
        return memo[id(value)]
    own: Any = value
    if type(value) is list:
        own = memo[id(value)] = []
        own.extend(_own(part, memo) for part in value)
    elif type(value) is dict:
        own = memo[id(value)] = {}
        own.update((key, _own(part, memo)) for key, part in value.items())
    elif type(value) is tuple:
        own = tuple(_own(part, memo) for part in value)
    elif _is_tensor(value):
        own = value.detach().clone()
    return memo.setdefault(id(value), own)


class _Reader:
    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._numbers: set[str] = set()
        """Names that hold integers: variables of loops over layers."""
        self.loops = 0

    def outside(self, statement: Any) -> None:
        if isinstance(statement, ast.For) and self._is_every_step(statement.iter):
            _require(isinstance(statement.target, ast.Name) and not statement.orelse)
        elif isinstance(statement, ast.With):
            (item,) = statement.items if len(statement.items) == 1 else (None,)
            _require(item is not None and self._is_every_step(item.context_expr))
        else:
            _require(isinstance(statement, ast.Pass))
            return
        self.loops += 1
        for each in statement.body:
            self.inside(each)

    def inside(self, statement: Any) -> None:
        if isinstance(statement, ast.For):
            _require(not statement.orelse)
            self._require_integers(statement.iter)
            self._numbers.add(_as(ast.Name, statement.target).id)
            for each in statement.body:
                self.inside(each)
        elif isinstance(statement, ast.AugAssign):
            _require(isinstance(statement.op, _OPERATORS))
            target: Any = statement.target
            self._require_place(target.value if _takes_all(target) else target)
            self._require_row(statement.value)
        elif isinstance(statement, ast.Assign):
            _require(len(statement.targets) == 1 and _takes_all(statement.targets[0]))
            self._require_place(_as(ast.Subscript, statement.targets[0]).value)
            self._require_row(statement.value)
        else:
            _require(isinstance(statement, ast.Pass))

    def _is_every_step(self, node: Any) -> bool:
        """``tracer.all()`` or ``tracer.iter[:]``."""
        if isinstance(node, ast.Call):
            return not node.args and not node.keywords and self._is_of_tracer(node.func, "all")
        if not isinstance(node, ast.Subscript) or not isinstance(part := node.slice, ast.Slice):
            return False
        return not (part.lower or part.upper or part.step) and self._is_of_tracer(node.value, "iter")

    def _is_of_tracer(self, node: Any, name: str) -> bool:
        if not isinstance(node, ast.Attribute) or node.attr != name or not isinstance(node.value, ast.Name):
            return False
        return getattr(type(self._values.get(node.value.id)), "runs_edits", False)

    def _require_place(self, node: Any) -> None:
        """``model.resid_post[i]`` and the like, or the output or input of a module."""
        if isinstance(node, ast.Subscript):
            stream = node.value
            _require(isinstance(stream, ast.Attribute) and stream.attr in _STREAMS and self._is_model(stream.value))
            self._require_integer(node.slice)
            return
        _require(isinstance(node, ast.Attribute))
        if not (node.attr in _WHOLE and self._is_model(node.value)):
            _require(node.attr in ("output", "input"))
            self._require_module(node.value)

    def _is_model(self, node: Any) -> bool:
        return isinstance(node, ast.Name) and isinstance(self._values.get(node.id), ModelPlaces)

    def _require_module(self, node: Any) -> None:
        while True:
            if isinstance(node, ast.Name):
                _require(isinstance(self._values.get(node.id), (ModelPlaces, Node)))
                return
            if isinstance(node, ast.Subscript):
                self._require_integer(node.slice)
            else:
                _require(isinstance(node, ast.Attribute) and node.attr not in ("source", "output", "input", "inputs"))
            node = node.value

    def _require_row(self, node: Any) -> None:
        """Numbers, and vectors that are the same for every row."""
        if isinstance(node, ast.BinOp):
            _require(isinstance(node.op, _OPERATORS))
            self._require_row(node.left)
            self._require_row(node.right)
        elif isinstance(node, ast.UnaryOp):
            _require(isinstance(node.op, (ast.USub, ast.UAdd)))
            self._require_row(node.operand)
        elif isinstance(node, ast.Subscript):
            self._require_integer(node.slice)
            _require(_holds_rows(self._values.get(_as(ast.Name, node.value).id)))
        elif isinstance(node, ast.Name):
            _require(node.id not in self._numbers and _is_row(self._values.get(node.id)))
        else:
            _require(isinstance(node, ast.Constant) and type(node.value) in (int, float))

    def _require_integer(self, node: Any) -> None:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            node = node.operand
        if isinstance(node, ast.Name):
            _require(node.id in self._numbers or type(self._values.get(node.id)) is int)
        else:
            _require(isinstance(node, ast.Constant) and type(node.value) is int)

    def _require_integers(self, node: Any) -> None:
        if isinstance(node, (ast.List, ast.Tuple)):
            parts = node.elts
        elif isinstance(node, ast.Call):
            _require(isinstance(node.func, ast.Name) and node.func.id == "range" and not node.keywords)
            _require("range" not in self._values)
            parts = node.args
        else:
            held: Any = self._values.get(_as(ast.Name, node).id)
            _require(type(held) in (list, tuple, range) and all(type(each) is int for each in held))
            return
        for part in parts:
            self._require_integer(part)


def _takes_all(node: Any) -> bool:
    """``x[:]`` or ``x[...]``."""
    if not isinstance(node, ast.Subscript):
        return False
    part = node.slice
    if isinstance(part, ast.Slice):
        return not (part.lower or part.upper or part.step)
    return isinstance(part, ast.Constant) and part.value is Ellipsis


def _is_tensor(value: Any) -> bool:
    return hasattr(type(value), "untyped_storage")  # of its class: a node has whatever it is asked for


def _is_row(value: Any) -> bool:
    if type(value) in (int, float):
        return True
    return _is_tensor(value) and (value.ndim < 2 or (value.ndim == 2 and value.shape[0] == 1))


def _holds_rows(value: Any) -> bool:
    if _is_tensor(value):
        return value.ndim == 2
    parts = value.values() if type(value) is dict else value
    return type(value) in (list, tuple, dict) and all(map(_is_row, parts))


def _as(kind: type, node: Any) -> Any:
    _require(isinstance(node, kind))
    return node


def _require(condition: bool) -> None:
    if not condition:
        raise OtherwiseError
