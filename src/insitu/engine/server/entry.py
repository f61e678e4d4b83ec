"""vLLM's own server, in whichever modules the version at hand has it: one up to 0.31, several since."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import vllm

from insitu.block import EngineError

_ENTRIES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.launchers.api_server.entry", "__main__")
"""Names that the module has which builds the engine and serves it, imported or started with ``python -m``."""
_ATTACH = ("_attach_endpoint_plugins", "attach_endpoint_plugins")


def entries() -> Iterator[Any]:
    """The modules of this process that can start the server; none where it is no server."""
    for module in (sys.modules.get(name) for name in _ENTRIES):
        run = getattr(module, "run_server", None)
        if module is not None and run is not None and run.__module__ == module.__name__:  # not what re-exports it
            yield module


def attaching(entry: Any) -> tuple[Any, str]:
    """The module that gives a new app its endpoint plugins, and the name by which it calls the function for it.

    Raises ``EngineError`` if this version does that in a way that insitu does not know.
    """
    app = sys.modules[entry.build_app.__module__]
    for name in _ATTACH:
        if hasattr(app, name):
            return app, name
    raise EngineError(
        f"vLLM {vllm.__version__} has another server than those to which insitu adds its routes: "
        f"docs/compatibility.md lists what it knows. insitu.VLLM(..., mode='async') needs no server"
    )
