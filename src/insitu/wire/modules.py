"""Which modules' functions and classes travel as code, and which by their name."""

from __future__ import annotations

import site
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle


@contextmanager
def by_value() -> Iterator[None]:
    """While this lasts, functions and classes of the user's own files are pickled as code.

    The other side need not be able to import those files, which may have been edited, or be a script
    that would run all over.
    """
    chosen = cloudpickle.list_registry_pickle_by_value()
    ours = [module for name, module in _of_user(len(sys.modules)).items() if name not in chosen]
    for module in ours:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in ours:
            cloudpickle.unregister_pickle_by_value(module)


@lru_cache(maxsize=1)
def _of_user(count: int) -> dict[str, ModuleType]:
    """The user's own modules; looked for again whenever the ``count`` of all has changed."""
    return {module.__name__: module for module in list(sys.modules.values()) if _is_users(module)}


def is_users_class(thing: Any) -> bool:
    """Whether a class (or function) was defined in one of the user's own files, or typed in."""
    name = getattr(thing, "__module__", None)
    if name in (None, "builtins"):
        return False
    module = sys.modules.get(name)
    return name in ("__main__", "__mp_main__") or module is None or _is_users(module)


def _is_users(module: ModuleType) -> bool:
    if not isinstance(module, ModuleType):
        return False
    file = getattr(module, "__file__", None)
    name = getattr(module, "__name__", None)
    if not file or not name or name == "__main__" or sys.modules.get(name) is not module:
        return False
    return name.partition(".")[0] not in _NEVER and not _is_installed(file)


# cloudpickle's own functions are what everything else is made of on the other side.
_NEVER = {__name__.partition(".")[0], "cloudpickle"}


@cache
def _is_installed(file: str) -> bool:
    return file.startswith(_installed_folders(tuple(sys.path)))


@lru_cache(maxsize=1)
def _installed_folders(searched: tuple[str, ...]) -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {*site.getsitepackages(), site.getusersitepackages()}
    # `pip install --target` puts packages where PYTHONPATH says.
    found |= {folder.rstrip("/") for folder in searched if folder and any(Path(folder).glob("*.dist-info"))}
    return tuple(path + "/" for path in found)
