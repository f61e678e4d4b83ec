"""Feeds the decoders of the wire with what atheris makes up: `pip install atheris; python tools/fuzz.py FOLDER`.

FOLDER keeps what was found worth trying. Anything but the decoders' own error is a fault. Further arguments are
libFuzzer's, such as `-max_total_time=60 -rss_limit_mb=1500 -timeout=10`.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

atheris: Any = importlib.import_module("atheris")  # no dependency of this project

with atheris.instrument_imports(include=["insitu.net"]):
    from insitu.net import FrameReader, TraceRequest, WireError, WireLimits, decode_event, decode_frame, decode_json
    from insitu.net.frames import Frame

SMALL = WireLimits(header=20_000, tensors=20_000, count=20, items=2_000, composite_keys=10)


def request(data: bytes) -> None:
    TraceRequest.of_frame(decode_frame(data, SMALL), SMALL)


def stream(data: bytes) -> None:
    reader, middle = FrameReader(SMALL), len(data) // 2
    for part in (data[:middle], data[middle:]):
        for frame in reader.feed(part):
            decode_event(frame, SMALL, "numpy")
    reader.close()


def event(data: bytes) -> None:
    decode_event(Frame(decode_json(data, SMALL)), SMALL, "numpy")


def every_decoder(data: bytes) -> None:
    for decode in (request, stream, event):
        try:
            decode(data)
        except WireError:
            continue


if __name__ == "__main__":
    atheris.Setup(sys.argv, every_decoder)
    atheris.Fuzz()
