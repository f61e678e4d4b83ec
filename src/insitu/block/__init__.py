"""Taking code out of its place: the body of a `with`, found in the source, kept from running, run elsewhere.

This floor needs the standard library only.
"""

from .block import Block, SentOnce
from .captured import CapturedBody
from .captured_async import AsyncCapturedBody
from .errors import (
    ArgumentError,
    BlockError,
    BlockSyntaxError,
    EngineError,
    InsituError,
    LimitError,
    LocationError,
    NotAllowedError,
    NotReachedError,
    OutOfOrderError,
    OutsideTraceError,
    PromptError,
    RequestError,
    SharedModuleError,
    SourceError,
    UnknownModuleError,
    UnsavedWarning,
    WriteError,
)
from .function import FunctionBlock
from .lost import Lost
from .saves import Saves, current_saves, save
from .scope import Scope
from .site import Site
from .tracebacks import user_traceback

__all__ = [
    "ArgumentError",
    "AsyncCapturedBody",
    "Block",
    "BlockError",
    "BlockSyntaxError",
    "CapturedBody",
    "EngineError",
    "FunctionBlock",
    "InsituError",
    "LimitError",
    "LocationError",
    "Lost",
    "NotAllowedError",
    "NotReachedError",
    "OutOfOrderError",
    "OutsideTraceError",
    "PromptError",
    "RequestError",
    "Saves",
    "Scope",
    "SentOnce",
    "SharedModuleError",
    "Site",
    "SourceError",
    "UnknownModuleError",
    "UnsavedWarning",
    "WriteError",
    "current_saves",
    "save",
    "user_traceback",
]
