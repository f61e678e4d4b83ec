"""Whatever bytes arrive, decoders end in a value or in the one error, soon, and hold no more than they may."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from insitu import ArgumentError
from insitu.guard import NotAllowedError, restricted
from insitu.net import (
    Decoder,
    Encoder,
    Frame,
    FrameReader,
    TraceBuilder,
    TraceRequest,
    WireError,
    WireLimits,
    decode_event,
    decode_frame,
    encode_event,
    encode_frame,
)
from insitu.net.errors import FormError
from insitu.net.events import Saves
from insitu.net.form import parsed
from insitu.net.tensors import TensorReader
from tests.net.test_requests import shifted

SMALL = WireLimits(header=20_000, tensors=20_000, count=20, items=2_000, composite_keys=10)
FUZZ = settings(max_examples=400, deadline=2000, suppress_health_check=list(HealthCheck))
KINDS = "tuple record dict set frozenset same cache tensor array float complex bytes slice range ellipsis module dtype"
KEYS = [*"$vinf", "request", "completion", "outputs", "token_ids", "text", "index", "logprob", "lists", "visits"]

SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8)
TAGS = st.sampled_from(
    [*KINDS.split(), "member", "device", "function", "named", "request", "completion", "logprob", "odd"]
)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    parts = st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    tagged = st.builds(lambda tag, rest: {**rest, "$": tag}, TAGS, parts)
    return tagged | parts | st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)


JSON = st.recursive(SCALARS, _objects, max_leaves=25)


def a_request() -> bytes:
    builder = TraceBuilder()
    builder.add("prompt", shifted, {"rows": [1, {"a": (2.5, b"x")}], "s": {1, 2}})
    return encode_frame(builder.request().frame())


def an_event() -> bytes:
    import torch

    return encode_frame(encode_event(Saves(0, {"x": torch.ones(3, 2), "y": [torch.zeros(2)]})))


REQUEST, EVENT = a_request(), an_event()


@FUZZ
@given(JSON)
def test_values(data: Any) -> None:
    try:
        Decoder(TensorReader(b""), SMALL, lambda ref: ref).decode(data)
    except WireError:
        return


@FUZZ
@given(JSON)
def test_what_is_decoded_is_encoded_again(data: Any) -> None:
    try:
        value = Decoder(TensorReader(b""), SMALL, lambda ref: ref).decode(data)
    except WireError:
        return
    encoder = Encoder()
    try:
        again = json.dumps(encoder.encode(value), allow_nan=False)
    except ArgumentError:  # a name of something of the other side
        return
    Decoder(TensorReader(encoder.tensors.data()), SMALL, lambda ref: ref).decode(json.loads(again))


@FUZZ
@given(st.binary(max_size=400))
def test_bytes(data: bytes) -> None:
    for decode in (decode_frame, TensorReader):
        try:
            decode(data, SMALL)
        except WireError:
            continue
    try:
        list(FrameReader(SMALL).feed(data))
    except WireError:
        return


@FUZZ
@given(st.data())
def test_messages_with_some_bytes_changed(data: st.DataObject) -> None:
    for whole in (REQUEST, EVENT):
        raw = bytearray(whole)
        for _ in range(data.draw(st.integers(1, 6))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        raw = raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw
        try:
            frame = decode_frame(bytes(raw), SMALL)
            if whole is EVENT:
                decode_event(frame, SMALL)
            else:
                restricted(TraceRequest.of_frame(frame), lambda named: None, wire=SMALL)
        except (WireError, NotAllowedError):
            continue


@FUZZ
@given(st.dictionaries(st.sampled_from(["insitu", "kind", "stream", "invokes", "functions", "values", "error"]), JSON))
def test_headers(header: dict[str, Any]) -> None:
    for decode in (TraceRequest.of_frame, decode_event):
        try:
            decode(Frame(header, b""))
        except WireError:
            continue


@FUZZ
@given(st.dictionaries(st.text(max_size=3), JSON, max_size=4), st.binary(max_size=64))
def test_headers_of_tensors(header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    try:
        reader = TensorReader(struct.pack("<Q", len(text)) + text + data, SMALL)
        reader.get(0)
    except WireError:
        return


@FUZZ
@given(JSON | st.builds(lambda *a: {"actions": list(a)}, _objects(SCALARS), _objects(SCALARS)))
def test_forms(data: Any) -> None:
    try:
        parsed(json.dumps(data))
    except FormError:
        return


@FUZZ
@given(st.text(max_size=200))
def test_code(text: str) -> None:
    header = json.loads(bytes(decode_frame(REQUEST).tensors) or b"{}") or dict(decode_frame(REQUEST).header)
    header["functions"][0]["code"]["text"] = text
    try:
        restricted(TraceRequest.of_frame(Frame(header, b"")), lambda named: None)
    except (WireError, NotAllowedError):
        return


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": ' + b"[" * 3_000_000,
        b'{"a": [' + b"[]," * 1_000_000 + b"1]}",
        b'{"a": "' + b"x" * 3_900_000 + b'"}',
        b'{"a": ' + b'{"a":' * 500_000,
    ],
    ids=["open", "many", "long", "objects"],
)
def test_memory_is_bounded(data: bytes) -> None:
    tracemalloc.start()
    try:
        header = decode_frame(struct.pack("<4sIQ", b"ISU1", len(data), 0) + data).header
        Decoder().decode(header["a"])
    except WireError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 40 * WireLimits().header


def test_what_is_announced_is_not_allocated() -> None:
    tracemalloc.start()
    with pytest.raises(WireError, match="more than"):
        decode_frame(struct.pack("<4sIQ", b"ISU1", 10, 2**60))
    header = json.dumps({"0": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    with pytest.raises(WireError, match="does not lie where its shape says"):
        TensorReader(struct.pack("<Q", len(header)) + header)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("shape", [[0, 2**61, 2**61], [2**40, 2**40, 0], [1, 0, 2**33, 2**33], [0, 2**62 - 1]])
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_a_shape_of_no_elements_that_overflows(shape: list[int], library: Any) -> None:
    header = json.dumps({"0": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    with pytest.raises(WireError, match="a shape or a place that can't be"):
        TensorReader(struct.pack("<Q", len(header)) + header, library=library).get(0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"$": "completion", "index": 0, "text": "", "token_ids": 5}, "are lists"),
        ({"$": "request", "outputs": 5}, "are lists"),
        (10**4000, "an int of more than 8192 bits"),
        ({"$": "set", "v": [{"$": "complex", "v": [f"{-1000003 * k}", f"{k}"]} for k in range(20000)]}, "composite"),
        ({"$": "set", "v": [{"$": "range", "v": [k, k + 2, 1]} for k in range(20000)]}, "composite"),
    ],
    ids=["token-ids", "outputs", "long-int", "equal-hashes", "ranges"],
)
def test_values_that_would_fail_later_or_take_long(data: Any, message: str) -> None:
    with pytest.raises(WireError, match=message):
        Decoder().decode(data)


def test_notes_of_an_error_are_a_list() -> None:
    with pytest.raises(WireError, match="notes"):
        decode_event(Frame({"kind": "failed", "invoke": None, "error": {"type": "X", "message": "", "notes": 5}}, b""))
