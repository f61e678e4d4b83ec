"""What stands after `as`, bound in the caller since the caller's own code is kept from doing so."""

from __future__ import annotations

import ast
import builtins
from typing import Any

from .mangle import Mangler, mangled
from .names import binds, reads
from .scope import Scope
from .source import compile_quietly
from .walk import clone

__all__ = ["Target"]

_VALUE = "__insitu_value__"


class Target:
    """A name, or anything else that can be assigned to."""

    def __init__(self, target: ast.expr, class_name: str | None) -> None:
        self._name = mangled(target.id, class_name) if isinstance(target, ast.Name) else None
        if self._name is None:
            value = ast.Name(_VALUE, ast.Load())
            statement = ast.copy_location(ast.Assign([clone(target)], value), target)
            tree = Mangler(class_name).visit(ast.fix_missing_locations(ast.Module([statement], [])))
            self._code = compile_quietly(tree, "<as target>")
            self._reads, self._binds = reads(self._code), binds(self._code)

    def bind(self, scope: Scope, value: Any) -> None:
        """Assign `value` as the caller would."""
        if self._name is not None:
            scope.bind({self._name: value})
            return
        namespace = {"__builtins__": builtins, **scope.values(self._reads), _VALUE: value}
        exec(self._code, namespace)
        scope.bind({name: namespace[name] for name in self._binds})
