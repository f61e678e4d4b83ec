"""A context manager for `async with` whose body is taken as a block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Generator
from types import TracebackType
from typing import Any

from .captured import without_signal
from .errors import InsituError
from .site import Site
from .tracebacks import set_traceback, shows_library, user_traceback

__all__ = ["AsyncCapturedBody"]


class AsyncCapturedBody(ABC):
    """`async with` on an instance skips the body and hands it to `run_block_async` as data.

    In all else it is as `CapturedBody`; a class may be both.
    """

    _sites: list[Site] | None = None

    @abstractmethod
    def target(self) -> Any:
        """What the `as` target gets. May refuse to be entered."""

    @abstractmethod
    async def run_block_async(self, site: Site) -> BaseException | None:
        """Run `site.block`, bind what it saved in `site.scope`; returns the error that the caller shall see."""

    def __aenter__(self) -> Awaitable[Any]:
        # No coroutine: nothing may be awaited between here and the body that is skipped.
        try:
            site = Site.here()
            value = self.target()
        except InsituError as error:
            set_traceback(error, error.__traceback__ if shows_library() else None, error.__context__)
            raise
        if self._sites is None:
            self._sites = []
        self._sites.append(site)
        site.skip(value)
        return _Ready(value)

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> bool | None:
        assert self._sites
        site = self._sites.pop()
        if not site.left(exc_type, exc):
            return False
        error = await self._run_async(site)
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

    async def _run_async(self, site: Site) -> BaseException | None:
        try:
            return await self.run_block_async(site)
        except BaseException as error:
            return error


class _Ready:
    """A value to be awaited that is there already."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, Any]:
        return self._value
        yield
