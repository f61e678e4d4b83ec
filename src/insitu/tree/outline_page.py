"""The outline of a model as HTML, for notebooks: a tree to fold out."""

from __future__ import annotations

from html import escape

from insitu.tree.outline import Outline, join

_STYLE = (
    "<style>.insitu details{margin-left:1.2em}.insitu div{margin-left:2.25em}.insitu summary{cursor:pointer}"
    ".insitu{font-family:monospace;line-height:1.5}.insitu i{opacity:.6;font-style:normal}</style>"
)


def outline_html(outline: Outline) -> str:
    """Every module with its class and shapes; equal neighbours are one entry, and the first two levels are open."""
    return f'{_STYLE}<div class="insitu" style="margin-left:0">{_entry(outline, "", "", 0)}</div>'


def _entry(outline: Outline, path: str, label: str, depth: int) -> str:
    module = outline.modules[path]
    name = f"<b>{escape(label)}</b> " if label else ""
    head = f"{name}{escape(module.kind)} <i>{escape(module.note)}</i>"
    runs = outline.runs(path)
    if not runs:
        return f'<div title="{escape(path)}">{head}</div>'
    inner = "".join(
        _entry(outline, join(path, first), first if first == last else f"{first}-{last}", depth + 1)
        for first, last in runs
    )
    shown = " open" if depth < 2 else ""
    return f'<details{shown}><summary title="{escape(path)}">{head}</summary>{inner}</details>'
