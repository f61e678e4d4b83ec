"""Runs a page of the docs with every trace sent as to a server, and prints what each of its blocks prints, as JSON."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any


def main(page: str, result: str) -> None:
    importlib.import_module("tests.conftest")  # its settings for vLLM
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    from insitu.engine.client import model as client
    from tests.docs import pages
    from tests.engine.remote import RemoteTrace

    models: list[Any] = []
    init = client.VLLM.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        models.append(self)

    client.VLLM.__init__ = noted  # type: ignore[method-assign]
    client.Trace = lambda engine, lock, prompts, settings, *_: RemoteTrace(models[-1], prompts, settings)  # type: ignore[misc,assignment]
    Path(result).write_text(json.dumps(pages.run_here(Path(page))))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
