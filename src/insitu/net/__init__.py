"""The wire form between a server and its clients: what travels, and how much of it. Needs neither torch nor vLLM.

A client makes a request with ``TraceBuilder``, sends ``encode_frame(request.frame())`` and reads events off the
answer with ``FrameReader`` and ``decode_event``. A server reads ``TraceRequest.of_frame(decode_frame(body))``, decodes
its values with ``decoded``, and answers with ``encode_frame(encode_event(event))``.

All that a decoder says of what it can't take is ``WireError``. Nothing is pickled.
"""

from insitu.net.building import TraceBuilder as TraceBuilder
from insitu.net.decoding import Decoder as Decoder
from insitu.net.errors import WireError as WireError
from insitu.net.events import Done as Done
from insitu.net.events import Event as Event
from insitu.net.events import Failed as Failed
from insitu.net.events import Output as Output
from insitu.net.events import Progress as Progress
from insitu.net.events import Saves as Saves
from insitu.net.events import decode_event as decode_event
from insitu.net.events import encode_event as encode_event
from insitu.net.failures import error_of as error_of
from insitu.net.failures import failure_of as failure_of
from insitu.net.frames import CONTENT_TYPE as CONTENT_TYPE
from insitu.net.frames import Frame as Frame
from insitu.net.frames import FrameReader as FrameReader
from insitu.net.frames import decode_frame as decode_frame
from insitu.net.frames import decode_json as decode_json
from insitu.net.frames import encode_frame as encode_frame
from insitu.net.frames import frame_parts as frame_parts
from insitu.net.keys import Key as Key
from insitu.net.keys import KeyLimits as KeyLimits
from insitu.net.keys import Keys as Keys
from insitu.net.keys import Permission as Permission
from insitu.net.limits import WireLimits as WireLimits
from insitu.net.outputs import CompletionOutput as CompletionOutput
from insitu.net.outputs import Logprob as Logprob
from insitu.net.outputs import RequestOutput as RequestOutput
from insitu.net.refs import Device as Device
from insitu.net.refs import Dtype as Dtype
from insitu.net.refs import FunctionRef as FunctionRef
from insitu.net.refs import Member as Member
from insitu.net.refs import ModuleRef as ModuleRef
from insitu.net.refs import Named as Named
from insitu.net.refs import Record as Record
from insitu.net.refs import Ref as Ref
from insitu.net.requests import DecodedFunction as DecodedFunction
from insitu.net.requests import DecodedInvoke as DecodedInvoke
from insitu.net.requests import DecodedTrace as DecodedTrace
from insitu.net.requests import FunctionSource as FunctionSource
from insitu.net.requests import InvokeRequest as InvokeRequest
from insitu.net.requests import TraceRequest as TraceRequest
from insitu.net.sources import CodeSource as CodeSource
from insitu.net.sources import block_source as block_source
from insitu.net.values import Encoder as Encoder
