"""The outline of a model: what modules it has, as the engine reports them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field

from insitu.block import UnknownModuleError
from insitu.tree.elsewhere import meant


@dataclass(frozen=True)
class Module:
    """One module: its class, its children in order, a short note on its parameters' shapes."""

    kind: str
    children: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Outline:
    """All modules of a model by path; the root's path is the empty string."""

    modules: dict[str, Module] = field(default_factory=dict)

    def __contains__(self, path: object) -> bool:
        return path in self.modules

    def children(self, path: str) -> tuple[str, ...]:
        return self.modules[path].children

    def require(self, path: str) -> None:
        """Raises ``UnknownModuleError``, naming the nearest path, if there is no such module."""
        if path in self.modules:
            return
        parent, _, name = path.rpartition(".")
        near = difflib.get_close_matches(path, self.modules, n=1, cutoff=0.5)
        if parent in self.modules:
            siblings = self.modules[parent].children
            close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.4)
            near = [join(parent, close[0])] if close else near
            where = f"`{parent}`" if parent else "the model"
            has = f"{where} ({self.modules[parent].kind}) has {_listed(siblings)}"
        else:
            has = "see print(model)"
        hint = f"; the nearest is `{near[0]}`" if near else ""
        raise UnknownModuleError(f"this model has no module `{path}`{hint}; {has}{meant(parent, name)}")

    def render(self, path: str = "", name: str = "") -> str:
        """The subtree at ``path``, one module a line, equal neighbours folded into one."""
        return "\n".join(self._lines(path, name, ""))

    def _lines(self, path: str, label: str, indent: str) -> list[str]:
        module = self.modules[path]
        head = f"{indent}({label}): {module.kind}" if label else f"{indent}{module.kind}"
        lines = [f"{head}  {module.note}".rstrip()]
        for first, last in self.runs(path):
            shown = first if first == last else f"{first}-{last}"
            lines += self._lines(join(path, first), shown, indent + "  ")
        return lines

    def runs(self, path: str) -> list[tuple[str, str]]:
        """Neighbouring numbered children of one shape, as (first, last)."""
        runs: list[tuple[str, str, str]] = []
        for child in self.modules[path].children:
            shape = self._shape(join(path, child)) if child.isdigit() else child
            if runs and child.isdigit() and runs[-1][2] == shape:
                runs[-1] = (runs[-1][0], child, shape)
            else:
                runs.append((child, child, shape))
        return [(first, last) for first, last, _ in runs]

    def _shape(self, path: str) -> str:
        return "\n".join(self._lines(path, "", ""))


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _listed(names: tuple[str, ...]) -> str:
    if not names:
        return "no submodules"
    shown = list(names) if len(names) <= 12 else [*names[:5], "...", names[-1]]
    return ", ".join(shown)
