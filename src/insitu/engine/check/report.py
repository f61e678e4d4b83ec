"""What a check of a model has found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Row:
    """One place, compared in one way.

    ``check``: ``"transformers"`` (with what transformers computes), ``"company"`` (alone and in a batch),
    ``"sum"`` (with what it is made of: the sum of other streams, the end of the layer before, the
    unembedding of the normed stream; of a pattern, with what attention returns for its values) or
    ``"values"`` (finite, and not all zero). ``difference`` is the largest of all prompts, the norm of the
    difference relative to that of the value. ``own_error``: that of transformers itself in this dtype,
    where it was measured.
    """

    check: str
    place: str
    layer: int | None
    difference: float
    bound: float
    own_error: float | None = None

    @property
    def passed(self) -> bool:
        return self.difference <= self.bound


@dataclass(frozen=True)
class CheckReport:
    """All rows of a check. ``reference`` says what the values were compared with, or why with nothing;
    ``not_compared`` are places that transformers has no counterpart of."""

    model: str
    dtype: str
    reference: str
    rows: tuple[Row, ...]
    not_compared: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.passed for row in self.rows)

    @property
    def failed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.passed)

    def show(self, console: Console | None = None) -> None:
        """Prints the largest difference of each place in each comparison, and whether the check passed."""
        from rich.console import Console  # not to be needed by `import insitu`
        from rich.table import Table

        console = console or Console()
        table = Table(title=f"{self.model}, {self.dtype}", title_justify="left", caption_justify="left")
        for column in ("place", "layers", *_COLUMNS.values(), ""):
            table.add_column(column, overflow="fold")
        for place, rows in _by_place(self.rows).items():
            cells = [_cell([row for row in rows if row.check == check]) for check in _COLUMNS]
            layers = len({row.layer for row in rows if row.layer is not None})
            table.add_row(place, str(layers or ""), *cells, _verdict(rows))
        console.print(table)
        console.print(f"compared with {self.reference}", highlight=False)
        if self.not_compared:
            console.print(f"no counterpart in transformers: {', '.join(self.not_compared)}", highlight=False)
        wrong = [f"{row.place}{'' if row.layer is None else f'[{row.layer}]'}" for row in self.failed]
        if self.passed:
            console.print(f"[green bold]passed[/green bold]: {len(self.rows)} comparisons", highlight=False)
        else:
            console.print(f"[red bold]failed[/red bold]: {', '.join(dict.fromkeys(wrong))}", highlight=False)


def joined(reports: Sequence[CheckReport]) -> CheckReport:
    """One of several copies of a model, whose number is beside each place."""
    if len(reports) == 1:
        return reports[0]
    numbered = [
        replace(row, place=f"{row.place} (copy {copy})") for copy, each in enumerate(reports) for row in each.rows
    ]
    return replace(reports[0], rows=tuple(numbered))


_COLUMNS = {"transformers": "transformers", "sum": "its parts", "company": "in a batch"}


def _cell(rows: list[Row]) -> str:
    if not rows:
        return ""
    worst = max(rows, key=lambda row: row.difference - row.bound)
    at = "" if worst.layer is None or not worst.difference else f" at {worst.layer}"
    shown = f"{worst.difference:.1e}{at}"
    return shown if worst.passed else f"[red bold]{shown}[/red bold], bound {worst.bound:.1e}"


def _verdict(rows: list[Row]) -> str:
    if all(row.passed for row in rows):
        return "[green]ok[/green]"
    wrong = any(row.check == "values" and not row.passed for row in rows)
    return "[red bold]not finite, or all zero[/red bold]" if wrong else "[red bold]differs[/red bold]"


def _by_place(rows: Iterable[Row]) -> dict[str, list[Row]]:
    places: dict[str, list[Row]] = {}
    for row in rows:
        places.setdefault(row.place, []).append(row)
    return places
