"""The arguments of a comparison, on whatever device, and its figures as JSON, Markdown and a picture."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import growth
from benchmarks.comparison import table as table_of_rows
from benchmarks.picture import picture

PEERS = ("transformers", "nnsight", "vllm-lens")
SWEEPS = ("one", "last", "every", "vectors")


def arguments(
    about: str | None, works: Sequence[str] = SWEEPS, peers: Sequence[str] = PEERS, **defaults: Any
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=512, help="at a time; 0 compares nothing (default: 512)")
    parser.add_argument("--tokens", type=int, default=32, help="of each prompt (default: 32)")
    parser.add_argument("--rounds", type=int, default=5, help="of each; the median counts (default: 5)")
    parser.add_argument(
        "--works", nargs="*", choices=works, default=list(works), help="those to compare (default: all)"
    )
    parser.add_argument("--peers", nargs="*", choices=peers, default=list(peers), help="those beside (default: all)")
    parser.add_argument("--nnsight", default="", help="an interpreter that has nnsight")
    parser.add_argument("--vllm-lens", default="", help="an interpreter that has vllm-lens")
    parser.add_argument("--eager", action="store_true", help="engines that are not compiled")
    parser.add_argument("--out", type=Path, help="folder for figures.json, figures.md and figures.png")
    parser.set_defaults(**defaults)
    return parser


def peers_of(chosen: argparse.Namespace) -> dict[str, str]:
    """The interpreter of each kind; this one for those that none is given for, which then says what is missing."""
    return {
        kind: getattr(chosen, kind.removesuffix("-vllm").replace("-", "_"), "") or sys.executable
        for kind in chosen.peers
    }


def write_down(folder: Path | None, rows: list[dict[str, Any]], curves: dict[str, growth.Curve], clock: str) -> None:
    """`clock`: which the picture is of, `"wall"` or `"cpu"`."""
    parts = [table_of_rows(rows)] if rows else []
    parts += [f"Processor time a request, µs\n\n{growth.table(curve, what)}" for what, curve in curves.items()]
    print("\n\n".join(parts))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "figures.json").write_text(json.dumps({"rows": rows, "growth": curves}, indent=1))
        (folder / "figures.md").write_text("\n\n".join(parts) + "\n")
        picture(rows, curves, clock, folder / "figures.png")
