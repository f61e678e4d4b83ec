"""A context manager whose body is taken as a block, written once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any

from .errors import InsituError
from .site import Site
from .tracebacks import set_traceback, shows_library, user_traceback

__all__ = ["CapturedBody", "without_signal"]


class CapturedBody(ABC):
    """`with` on an instance skips the body and hands it to `run_block` as data.

    An error that `run_block` returns or raises reaches the caller with a traceback that shows the caller's
    frame at the `with` and then the block's own lines. What is raised in the caller itself goes on its way.
    """

    _sites: list[Site] | None = None

    @abstractmethod
    def target(self) -> Any:
        """What the `as` target gets. May refuse to be entered."""

    @abstractmethod
    def run_block(self, site: Site) -> BaseException | None:
        """Run `site.block`, bind what it saved in `site.scope`; returns the error that the caller shall see.

        Don't leave the error in a local variable: it leads to its frames, and the frames lead to it.
        """

    def __enter__(self) -> Any:
        try:
            site = Site.here()
            value = self.target()
        except InsituError as error:
            # Nothing of the user's own has run yet: the line of the `with` says it all.
            set_traceback(error, error.__traceback__ if shows_library() else None, error.__context__)
            raise
        if self._sites is None:
            self._sites = []
        self._sites.append(site)
        site.skip(value)
        return value

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> bool | None:
        assert self._sites
        site = self._sites.pop()
        if not site.left(exc_type, exc):
            return False
        error = self._run(site)
        del site
        if error is None:
            return True
        context = without_signal(error, exc)
        try:
            raise error
        except BaseException as raised:
            set_traceback(raised, user_traceback(error), context)
            del error, context
            raise

    def _run(self, site: Site) -> BaseException | None:
        try:
            return self.run_block(site)
        except BaseException as error:
            return error


def without_signal(error: BaseException, signal: BaseException | None) -> BaseException | None:
    """The context of `error` as it were had the block run in the caller: what left the body is none of it."""
    around = signal.__context__ if signal is not None else None
    at, seen = error, {id(error)}
    while at.__context__ is not None and at.__context__ is not signal and id(at.__context__) not in seen:
        at = at.__context__
        seen.add(id(at))
    if at.__context__ is None or at.__context__ is signal:
        at.__context__ = around if around is not error else None
    return error.__context__
