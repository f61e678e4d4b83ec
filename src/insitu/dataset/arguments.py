"""The arguments of ``insitu capture``. Read without torch, so that ``--help`` is quick."""

from __future__ import annotations

import argparse
import ast
import re
from typing import Any

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_capture(commands: Any) -> None:
    capture = commands.add_parser(
        "capture",
        help="write what a model computes on a data set to disk",
        description="Writes what a model computes at some places, for each prompt of a data set, as shards of "
        "safetensors with a Parquet index. Stopped, killed or out of disk, the same command goes on where it was. "
        "Other options are vLLM's engine arguments, such as --dtype bfloat16 --max-model-len 512.",
        allow_abbrev=False,
    )
    required = capture.add_argument_group("required")
    required.add_argument("--model", required=True, help="a Hub id or a local folder")
    required.add_argument("--data", required=True, help="a text, JSON-lines, Parquet or CSV file, or a folder of them")
    required.add_argument(
        "--at", required=True, action="append", metavar="PLACE", help="resid_post[4:8], model.layers.*.mlp.output, ..."
    )
    required.add_argument("--out", required=True, metavar="DIR", help="the folder to write, or to go on with")
    capture.add_argument("--positions", default="all", help="all, last, a number, 3:7, or text:SOME TEXT")
    capture.add_argument("--phase", default="prompt", choices=("prompt", "generated", "all"))
    capture.add_argument("--dtype", help="of what is written; the model's if left out")
    capture.add_argument(
        "--apply", metavar="FUNCTION", help="mean, project:FILE, sae:FILE (safetensors) or FILE.py:NAME"
    )
    capture.add_argument("--column", help="where a row has its prompt")
    capture.add_argument("--truncate", type=int, metavar="TOKENS", help="cut prompts to so many tokens")
    capture.add_argument("--shard-bytes", type=_size, default=2**30, metavar="SIZE", help="such as 500MB; 1GiB")
    capture.add_argument("--window-tokens", type=int, metavar="TOKENS", help="how many run together")
    capture.add_argument(
        "--sampling", nargs="+", type=_setting, metavar="NAME=VALUE", help="max_tokens=32 temperature=0 ..."
    )
    capture.add_argument("--ray", metavar="ADDRESS", help="share the work on a Ray cluster: auto, local, HOST:PORT")
    capture.add_argument("--workers", type=int, metavar="N", help="how many engines share it (default: one a GPU)")
    capture.add_argument("--dry-run", action="store_true", help="say how many bytes it would write")


def value_of(text: str) -> Any:
    """A number where the text is one."""
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _size(text: str) -> int:
    match = re.fullmatch(r"([\d.]+)\s*([KMG]?I?B?)", text.upper())
    unit = match[2] if match else ""
    unit += "B" if unit and not unit.endswith("B") else ""
    if match is None or unit.removesuffix("B") == "I" or _UNITS.get("" if unit == "B" else unit) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give bytes, or 500MB, 1GiB")
    return int(float(match[1]) * _UNITS["" if unit == "B" else unit])


def _setting(text: str) -> tuple[str, Any]:
    name, given, value = text.partition("=")
    if not given:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value
