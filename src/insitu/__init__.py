"""insitu: read and edit what happens inside a language model while vLLM runs it.

Floors, each importing only from those below it::

    walkthrough, cli, dataset, recipes, plots
    engine      vLLM, and nothing else knows it
    guard       blocks from the network, restricted
    run         blocks beside any torch forward
    net         what travels between a server and its clients
    tree        nodes, places, the outline of a model
    block       a ``with`` body as data; standard library only
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from insitu._version import __version__ as __version__
from insitu.block import ArgumentError as ArgumentError
from insitu.block import BlockError as BlockError
from insitu.block import BlockSyntaxError as BlockSyntaxError
from insitu.block import EngineError as EngineError
from insitu.block import InsituError as InsituError
from insitu.block import LimitError as LimitError
from insitu.block import LocationError as LocationError
from insitu.block import NotAllowedError as NotAllowedError
from insitu.block import NotReachedError as NotReachedError
from insitu.block import OutOfOrderError as OutOfOrderError
from insitu.block import OutsideTraceError as OutsideTraceError
from insitu.block import PromptError as PromptError
from insitu.block import RequestError as RequestError
from insitu.block import SharedModuleError as SharedModuleError
from insitu.block import SourceError as SourceError
from insitu.block import UnknownModuleError as UnknownModuleError
from insitu.block import UnsavedWarning as UnsavedWarning
from insitu.block import WriteError as WriteError
from insitu.block import save as save
from insitu.block.errors import needing as _needing
from insitu.demo_model import demo_model as demo_model
from insitu.engine.client.model import VLLM as VLLM
from insitu.engine.remote.model import connect as connect

if TYPE_CHECKING:
    from insitu.dataset.capture import capture as capture
    from insitu.dataset.captured import Captured as Captured
    from insitu.dataset.errors import CaptureError as CaptureError
    from insitu.run import Cache as Cache

# Imported when they are asked for, because they need torch.
_WITH_TORCH = {
    "Cache": "insitu.run",
    "capture": "insitu.dataset.capture",
    "Captured": "insitu.dataset.captured",
    "CaptureError": "insitu.dataset.errors",
}


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        with _needing(f"insitu.{name} needs torch and more", "" if name == "Cache" else ",capture"):
            return getattr(import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module 'insitu' has no attribute {name!r}")
