"""The source of a block rewritten so that all it does goes through guards. Lines stay where they are."""

from __future__ import annotations

import ast
import linecache
from typing import Any, NoReturn

from RestrictedPython.transformer import IOPERATOR_TO_STR, RestrictingNodeTransformer

from insitu.block.saves import SAVE_NAME
from insitu.guard.errors import NotAllowedError
from insitu.guard.nodes import again, arguments_of, as_tuple, at, call_of, hashable, is_no_grad, within

__all__ = ["Restricting", "require_names"]

_OPERATORS = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.BitAnd: "&",
    ast.FloorDiv: "//",
    ast.MatMult: "@",
}
_COMPARES = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_COMPARES |= {ast.In: "in", ast.NotIn: "not in"}
_UNARY = {ast.UAdd: "+", ast.USub: "-", ast.Invert: "~"}
_INSTEAD = {
    "ClassDef": "a class can't be defined in it: use dicts, tuples and functions",
    "Import": "it can't import: torch, math and insitu are there under the names that you imported them by",
    "ImportFrom": "it can't import: torch, math and insitu are there under the names that you imported them by",
    "Match": "it can't use `match`: use `if`",
    "TryStar": "it can't use `except*`: use `except`",
    "AsyncFunctionDef": "it can't use `async`",
    "AsyncFor": "it can't use `async`",
    "AsyncWith": "it can't use `async`",
    "Await": "it can't use `await`",
}
_EXITS = (ast.Return, ast.Break, ast.Continue)
_MANY = 32
_MOST_ARGUMENTS = 255
_INT_BITS = 8192


class Restricting(RestrictingNodeTransformer):
    """Raises ``NotAllowedError``, with the line, at the first thing that a restricted block can't hold."""

    def __init__(self, filename: str) -> None:
        super().__init__()
        self._filename = filename

    def error(self, node: ast.AST, info: str) -> NoReturn:
        raise _refusal(node, info.rstrip("."), self._filename)

    def not_allowed(self, node: ast.AST) -> NoReturn:
        kind = type(node).__name__
        raise _refusal(node, _INSTEAD.get(kind, f"it can't use {kind}"), self._filename)

    def visit_ClassDef(self, node: ast.ClassDef) -> NoReturn:
        self.not_allowed(node)

    def visit_Import(self, node: ast.Import) -> NoReturn:
        self.not_allowed(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> NoReturn:
        self.not_allowed(node)

    # -- names ----------------------------------------------------------------------------

    def check_name(self, node: Any, name: str | None, allow_magic_methods: bool = False) -> None:
        if name is not None and name != "_" and name.startswith("_"):
            self.error(node, f"`{name}`: no name of it may begin with an underscore")
        super().check_name(node, name, False)

    def visit_Name(self, node: ast.Name) -> Any:
        if node.id in ("print", "printed"):
            self.error(node, f"`{node.id}` is not there: save what you want to see")
        self.check_name(node, node.id)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if node.attr.startswith("_"):
            self.error(node, f"`.{node.attr}`: no attribute that it uses may begin with an underscore")
        return super().visit_Attribute(node)

    def visit_Global(self, node: ast.Global) -> Any:
        for name in node.names:
            self.check_name(node, name)
        return node

    visit_Nonlocal = visit_Global  # type: ignore[assignment]  # noqa: N815

    def visit_keyword(self, node: ast.keyword) -> Any:
        self.check_name(node, node.arg)
        return self.node_contents_visit(node)

    # -- operators ------------------------------------------------------------------------

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        symbol = _OPERATORS[type(node.op)]
        node = self.node_contents_visit(node)
        return call_of(node, "_binary_", ast.Constant(symbol), node.left, node.right)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        symbol = _UNARY.get(type(node.op))
        node = self.node_contents_visit(node)
        if symbol is None or (isinstance(node.operand, ast.Constant) and isinstance(node.operand.value, (int, float))):
            return node
        return call_of(node, "_unary_", ast.Constant(symbol), node.operand)

    def visit_Compare(self, node: ast.Compare) -> Any:
        middles = node.comparators[:-1]
        if not all(isinstance(middle, (ast.Name, ast.Constant)) for middle in middles):
            self.error(node, "of a chain of comparisons, what stands in the middle must be a name: use `and`")
        lefts = [node.left, *middles]
        parts = [
            self._compared(node, op, left if index == 0 else again(left), right)
            for index, (op, left, right) in enumerate(zip(node.ops, lefts, node.comparators, strict=True))
        ]
        return parts[0] if len(parts) == 1 else ast.copy_location(ast.BoolOp(ast.And(), parts), node)

    def _compared(self, node: ast.Compare, op: ast.cmpop, left: ast.expr, right: ast.expr) -> ast.expr:
        left, right = self.visit(left), self.visit(right)
        symbol = _COMPARES.get(type(op))
        if symbol is None:  # `is` looks at nothing
            return ast.copy_location(ast.Compare(left, [op], [right]), node)
        return call_of(node, "_compare_", ast.Constant(symbol), left, right)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        """``E.a += v`` becomes ``_augmented_attr_(E, "a")("+=", v)``: E is evaluated, and read, before v."""
        symbol = ast.Constant(IOPERATOR_TO_STR[type(node.op)])
        target = node.target
        if isinstance(target, ast.Name):
            return super().visit_AugAssign(node)
        if isinstance(target, ast.Attribute):
            self.visit_Attribute(ast.copy_location(ast.Attribute(ast.Constant(0), target.attr, ast.Load()), target))
            begun = call_of(target, "_augmented_attr_", self.visit(target.value), ast.Constant(target.attr))
        else:
            begun = call_of(target, "_augmented_item_", self.visit(target.value), self.visit(target.slice))
        return at(ast.Expr(at(ast.Call(begun, [symbol, self.visit(node.value)], []), node)), node)

    def visit_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, int) and node.value.bit_length() > _INT_BITS:
            self.error(node, f"an int of {node.value.bit_length()} bits is larger than {_INT_BITS}")
        return super().visit_Constant(node)

    def visit_Slice(self, node: ast.Slice) -> Any:
        return self.node_contents_visit(node)

    # -- calls and texts ------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Name) and node.func.id == SAVE_NAME:
            node.args = [self.visit(argument) for argument in node.args]
            return node
        node = self.node_contents_visit(node)
        for position, argument in enumerate(node.args):
            if isinstance(argument, ast.Starred):
                guarded = call_of(argument, "_getiter_", argument.value)
                node.args[position] = at(ast.Starred(guarded, ast.Load()), argument)
        for keyword in node.keywords:
            if keyword.arg is None:
                keyword.value = call_of(keyword.value, "_mapping_", keyword.value)
        made = call_of(node, "_call_", node.func, *node.args)
        made.keywords = node.keywords
        return made

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        return call_of(node, "_joined_", *(self._part(part) for part in node.values))

    def _part(self, part: ast.expr) -> ast.expr:
        if not isinstance(part, ast.FormattedValue):
            return part
        spec = ast.Constant("") if part.format_spec is None else self.visit(part.format_spec)
        return call_of(part, "_format_", self.visit(part.value), ast.Constant(part.conversion), spec)

    def visit_TemplateStr(self, node: ast.AST) -> Any:
        self.not_allowed(node)

    def visit_List(self, node: ast.List) -> Any:
        return self._display(node)

    def visit_Tuple(self, node: ast.Tuple) -> Any:
        return self._display(node)

    def _display(self, node: Any) -> Any:
        node = self.node_contents_visit(node)
        if not isinstance(getattr(node, "ctx", None), ast.Store):
            for element in node.elts:
                if isinstance(element, ast.Starred):
                    element.value = call_of(element, "_getiter_", element.value)
            return self._counted(node, len(node.elts))
        return node

    def _counted(self, node: Any, count: int) -> Any:
        return call_of(node, "_counted_", node) if count > _MANY else node

    def visit_Set(self, node: ast.Set) -> Any:
        count = len(node.elts)
        node = self.node_contents_visit(node)
        node.elts = [
            at(ast.Starred(call_of(each, "_members_", each.value), ast.Load()), each)
            if isinstance(each, ast.Starred)
            else hashable(each)
            for each in node.elts
        ]
        return self._counted(node, count)

    def visit_SetComp(self, node: ast.SetComp) -> Any:
        node = super().visit_SetComp(node)  # type: ignore[assignment]
        node.elt = hashable(node.elt)
        return node

    def visit_DictComp(self, node: ast.DictComp) -> Any:
        node = super().visit_DictComp(node)  # type: ignore[assignment]
        node.key = hashable(node.key)
        return node

    def visit_Dict(self, node: ast.Dict) -> Any:
        node = self.node_contents_visit(node)
        node.keys = [None if key is None else hashable(key) for key in node.keys]
        node.values = [
            call_of(value, "_mapping_", value) if key is None else value
            for key, value in zip(node.keys, node.values, strict=True)
        ]
        return self._counted(node, len(node.keys))

    # -- statements -----------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> Any:
        node.targets = [as_tuple(target) for target in node.targets]
        if len(node.targets) > 1 and any(isinstance(target, ast.Tuple) for target in node.targets):
            self.error(node, "one value can't be unpacked into several targets: use a statement for each")
        return super().visit_Assign(node)

    def visit_For(self, node: ast.For) -> Any:
        node.target = as_tuple(node.target)
        return self.guard_iter(node)

    def visit_comprehension(self, node: ast.comprehension) -> Any:
        if node.is_async:
            self.error(node.target, "it can't use `async`")
        node.target = as_tuple(node.target)
        return super().visit_comprehension(node)

    def visit_While(self, node: ast.While) -> Any:
        node = self.node_contents_visit(node)
        node.body.insert(0, at(ast.Expr(call_of(node.test, "_tick_")), node.body[0]))
        return node

    def visit_Try(self, node: ast.Try) -> Any:
        for statement in node.finalbody:
            for inner in within(statement):
                if isinstance(inner, _EXITS):
                    self.error(inner, f"`{type(inner).__name__.lower()}` can't be in a `finally`")
        for inner in (each for statement in [*node.body, *node.handlers] for each in within(statement)):
            if isinstance(inner, (ast.Yield, ast.YieldFrom)):
                self.error(inner, "`yield` can't be in a `try`, which would go on after the block")
        return self.node_contents_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> Any:
        self.check_name(node, node.name)
        node = self.node_contents_visit(node)
        kinds = [] if node.type is None else [node.type]
        node.type = call_of(node if node.type is None else node.type, "_catchable_", *kinds)
        return node

    def visit_With(self, node: ast.With) -> Any:
        """``with torch.no_grad():`` is its body; any other is a loop over steps, which is what its manager gives."""
        item, *others = node.items
        if others:
            node.body = [at(ast.With(others, node.body), node)]
        if is_no_grad(item.context_expr):
            if item.optional_vars is not None:
                self.error(node, "`torch.no_grad()` gives no value")
            return self._body(node)
        for inner in (each for statement in node.body for each in within(statement)):
            if isinstance(inner, _EXITS):
                self.error(inner, f"`{type(inner).__name__.lower()}` can't leave a `with`")
        target = item.optional_vars
        if target is not None and not isinstance(target, ast.Name):
            self.error(target, "the step of a `with` is given to one name")
        name = at(ast.Name("_step", ast.Store()), node) if target is None else self.visit(target)
        steps = call_of(item.context_expr, "_entered_", self.visit(item.context_expr))
        return at(ast.For(name, steps, self._body(node).body, []), node)

    def _body(self, node: ast.With) -> ast.If:
        return self.node_contents_visit(at(ast.If(ast.Constant(True), node.body, []), node))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.decorator_list = [each for each in node.decorator_list if not is_no_grad(each)]
        if node.decorator_list:
            self.error(node.decorator_list[0], "a function in it can't be decorated: call what the decorator calls")
        self.check_name(node, node.name)
        node.returns = None
        for argument in arguments_of(node.args):
            argument.annotation = None
        self.check_function_argument_names(node)
        self._require_few(node, node.args)
        return self.node_contents_visit(node)

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        self._require_few(node, node.args)
        return super().visit_Lambda(node)

    def _require_few(self, node: ast.AST, arguments: ast.arguments) -> None:
        if len(arguments_of(arguments)) > _MOST_ARGUMENTS:
            self.error(node, f"a function has at most {_MOST_ARGUMENTS} arguments")

    def visit_YieldFrom(self, node: ast.YieldFrom) -> Any:
        node = self.node_contents_visit(node)
        node.value = call_of(node.value, "_getiter_", node.value)
        return node

    def visit_Module(self, node: ast.Module) -> Any:
        return self.node_contents_visit(node)


def require_names(tree: ast.AST, filename: str) -> None:
    """Refuses the name that saving has in a block's code, which nobody writes by accident."""
    for node in ast.walk(tree):
        names = [getattr(node, each, None) for each in ("id", "attr", "arg", "name")]
        if SAVE_NAME in names or SAVE_NAME in (getattr(node, "names", None) or ()):
            raise _refusal(node, f"`{SAVE_NAME}`: no name of it may begin with an underscore", filename)


def _refusal(node: ast.AST, why: str, filename: str) -> NotAllowedError:
    line = getattr(node, "lineno", 0)
    text = linecache.getline(filename, line).strip() if not filename.startswith("<client>") else ""
    shown = f" ({text})" if text else ""
    return NotAllowedError(f"line {line} of a restricted block{shown}: {why}")
