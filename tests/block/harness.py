"""A manager that runs its block at once, in place of an engine. Standard library only."""

from __future__ import annotations

import sys
import traceback
import warnings
from typing import Any

from insitu.block import Block, CapturedBody, Saves, Site
from insitu.block.containers import changed


class Trace(CapturedBody):
    """Keeps what the last block was; what the block saved is bound in the caller."""

    def __init__(self, target: Any = "the target") -> None:
        self._target = target
        self.block: Block | None = None
        self.saved: dict[str, Any] = {}
        self.changed: list[str] = []

    def target(self) -> Any:
        return self._target

    def run_block(self, site: Site) -> BaseException | None:
        self.block = block = site.block
        originals = site.scope.values(block.reads)
        copies = site.scope.copied(originals)
        saves = Saves()
        namespace = block.namespace(copies, saves, site.scope.module_name)
        try:
            block.execute(namespace)
        except BaseException as error:
            assert error.__traceback__ is not None
            error.__traceback__ = error.__traceback__.tb_next  # without this function
            return error
        finally:
            self._bind(site, namespace, saves, originals, copies)
        return None

    def _bind(
        self,
        site: Site,
        namespace: dict[str, Any],
        saves: Saves,
        originals: dict[str, Any],
        copies: dict[str, Any],
    ) -> None:
        self.saved = saves.collect(namespace, site.block.binds)
        self.changed = [name for name in changed(originals, copies) if name not in self.saved]
        site.scope.bind(self.saved)


def lines_of(error: BaseException) -> list[tuple[str, str | None]]:
    """Function name and source line of each entry of a traceback."""
    return [(entry.name, entry.line) for entry in traceback.extract_tb(error.__traceback__)]


def raised(call: Any, *arguments: Any) -> BaseException:
    """The exception that a call raises."""
    try:
        call(*arguments)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def run_all(module: dict[str, Any]) -> int:
    """Run every `test_` function of a module; the number of those that fail."""
    failed = 0
    warnings.filterwarnings("error", module="insitu")
    tests = [(name, value) for name, value in module.items() if name.startswith("test_")]
    for name, test in tests:
        try:
            test()
        except BaseException:
            failed += 1
            print(f"FAILED {name}\n{traceback.format_exc()}", file=sys.stderr)
    print(f"{len(tests) - failed} of {len(tests)} passed on Python {sys.version.split()[0]}")
    return failed
