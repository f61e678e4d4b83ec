"""The command ``insitu``."""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from insitu.block import InsituError
from insitu.block.errors import needing
from insitu.dataset.arguments import add_capture


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0 if all is well, 1 if a check failed, 2 if it could not run."""
    parser = argparse.ArgumentParser(prog="insitu", description="Read and edit what happens inside a model.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_check(commands)
    add_capture(commands)
    commands.add_parser("demo", help="a walkthrough with a small real model", add_help=False)
    commands.add_parser(
        "serve", help="vLLM's server with insitu's routes; takes what `vllm serve` takes", add_help=False
    )
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["serve"]:
        return _told("serve", lambda: _serve(given[1:]))
    arguments, rest = parser.parse_known_args(given)
    # vLLM logs its whole configuration, which would drown what is to be seen.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if arguments.command == "demo":
        return _told("demo", lambda: _demo(rest))
    run = {"check": _check, "capture": _capture}[arguments.command]
    return _told(arguments.command, lambda: run(arguments, _engine_args(rest, parser)))


def _told(command: str, run: Callable[[], int]) -> int:
    try:
        return run()
    except InsituError as error:
        print(f"insitu {command}: {error}", file=sys.stderr)
        return 2


def _add_check(commands: Any) -> None:
    check = commands.add_parser(
        "check",
        help="compare what insitu reads of a model with transformers",
        description="Compares what insitu reads of a model with what transformers computes, with itself, and alone "
        "with in a batch. Other options are vLLM's engine arguments, such as --dtype bfloat16 "
        "--max-model-len 512 --enforce-eager. Exit status: 0 passed, 1 failed, 2 could not run.",
        allow_abbrev=False,
    )
    check.add_argument("model", help="a Hub id or a local folder")
    check.add_argument("--prompt", action="append", metavar="TEXT", help="instead of the prompts it has (repeatable)")
    check.add_argument(
        "--no-reference", action="store_true", help="compare with itself alone: no second model is loaded"
    )


def _check(arguments: argparse.Namespace, engine_args: dict[str, Any]) -> int:
    from insitu.engine.client.model import VLLM

    with VLLM(arguments.model, **engine_args) as model:
        report = model.check(arguments.prompt, reference=not arguments.no_reference)
    return 0 if report.passed else 1


def _capture(arguments: argparse.Namespace, engine_args: dict[str, Any]) -> int:
    with needing("capturing a data set needs vLLM, pyarrow and more", ",capture"):
        from insitu.dataset.command import run

    return run(arguments, engine_args)


def _serve(arguments: Sequence[str]) -> int:
    with needing("serving a model needs vLLM"):
        from insitu.engine.server.serve import serve

    serve(arguments)
    return 0


def _demo(rest: Sequence[str]) -> int:
    from insitu.walkthrough import main as walk

    walk(rest)
    return 0


def _engine_args(rest: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """``--max-model-len 512 --enforce-eager`` as keyword arguments. Whether vLLM has them is checked later."""
    found: dict[str, Any] = {}
    values = list(rest)
    while values:
        option = values.pop(0)
        if not option.startswith("--"):
            parser.error(f"unrecognized argument: {option}")
        name, given, value = option[2:].partition("=")
        name = name.replace("-", "_")
        if given:
            found[name] = _value(value)
        elif values and not values[0].startswith("--"):
            found[name] = _value(values.pop(0))
        elif name.startswith("no_"):
            found[name.removeprefix("no_")] = False
        else:
            found[name] = True
    return found


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return {"true": True, "false": False}.get(text.lower(), text)


if __name__ == "__main__":
    sys.exit(main())
