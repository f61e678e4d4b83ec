"""What is changed in a block's tree so that it means the same as module-level code.

Every node keeps its place in the user's file. Rewriting what was rewritten changes nothing: a block inside a
block is taken from the outer one's tree.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from .annotations import DropAnnotations
from .mangle import Mangler, mangled
from .marks import Mark, Unmark
from .nonlocals import NonlocalToGlobal
from .supers import SuperArguments

__all__ = ["rewritten"]


def rewritten(body: Sequence[ast.stmt], class_name: str | None, first_argument: str | None) -> ast.Module:
    """`body` as a module: private names written out, `super()` given its arguments, `x.save()` made a mark.

    `body` itself is changed. `first_argument` is that of the function around it, for `super()`.
    """
    module = ast.Module(body=list(body), type_ignores=[])
    if class_name is not None:
        module = Mangler(class_name).visit(module)
    module = SuperArguments(first_argument and mangled(first_argument, class_name)).visit(module)
    module = NonlocalToGlobal().visit(module)
    module = DropAnnotations().visit(module)
    module = Unmark().visit(module)
    module = Mark().visit(module)
    first = module.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        module.body.insert(0, ast.copy_location(ast.Pass(), first))  # else it would become a docstring
    return ast.fix_missing_locations(module)
