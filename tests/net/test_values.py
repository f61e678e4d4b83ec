"""Values, requests and events come back as they were sent."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import numpy
import pytest
import torch

from insitu import ArgumentError
from insitu.net import (
    Decoder,
    Device,
    Done,
    Dtype,
    Encoder,
    Failed,
    Frame,
    FrameReader,
    Logprob,
    ModuleRef,
    Named,
    Progress,
    Record,
    RequestOutput,
    Saves,
    WireError,
    decode_event,
    decode_frame,
    decode_json,
    encode_event,
    encode_frame,
)
from insitu.net.tensors import TensorReader

PLAIN = [
    None,
    True,
    0,
    -(2**63),
    2**200,
    1.5,
    -0.0,
    math.inf,
    -math.inf,
    "text",
    "ünï\n😀",
    b"\0\xff",
    [],
    [1, [2.0, None]],
    (),
    (1, ("a",)),
    {},
    {"a": 1, 2: [3], (1, 2): None, None: "x"},
    set(),
    {1, "a"},
    frozenset({1, 2}),
    slice(None, 3, -1),
    range(2, 10, 3),
    ...,
    complex(1, -2),
    Record("Pair", ("a", "b"), [1, 2]),
]


def there_and_back(value: Any, **decoding: Any) -> Any:
    encoder = Encoder(lambda obj: Named("model") if obj is Encoder else None)
    header = json.loads(json.dumps(encoder.encode(value), allow_nan=False))
    return Decoder(TensorReader(encoder.tensors.data()), **decoding).decode(header)


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_a_plain_value_comes_back(value: Any) -> None:
    found = there_and_back(value)
    assert found == value
    assert type(found) is type(value)


def test_nan_and_the_sign_of_zero_come_back() -> None:
    assert math.isnan(there_and_back(math.nan))
    assert math.copysign(1, there_and_back(-0.0)) == -1


@pytest.mark.parametrize(
    "dtype",
    [
        *("bool", "uint8", "int8", "uint16", "int16", "int32", "uint32", "int64", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2, 0, 4)])
def test_a_tensor_comes_back_with_its_dtype_and_bits(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 10).abs().to(getattr(torch, dtype))
    found = there_and_back([tensor, tensor])
    assert found[0].dtype == tensor.dtype
    assert found[0].shape == tensor.shape
    assert torch.equal(found[0].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_without_torch_a_dtype_that_numpy_lacks_is_widened_exactly(dtype: str) -> None:
    size = torch.zeros((), dtype=getattr(torch, dtype)).element_size()
    every = torch.arange(256 ** min(size, 2), dtype=torch.int32)
    tensor = every.to(torch.uint8 if size == 1 else torch.int16).view(getattr(torch, dtype))
    encoder = Encoder()
    header = encoder.encode(tensor)
    found = Decoder(TensorReader(encoder.tensors.data(), library="numpy")).decode(header)
    numpy.testing.assert_array_equal(found, tensor.float().numpy())


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "int64", "float16", "float32", "float64", ">f4", "uint32"])
def test_an_array_comes_back_as_an_array_or_as_a_tensor(dtype: str) -> None:
    array = numpy.arange(12).reshape(3, 4).T.astype(dtype)
    found = there_and_back(array)
    numpy.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype.newbyteorder("=")
    tensor = there_and_back(array, arrays="torch")
    assert isinstance(tensor, torch.Tensor)
    assert tensor.tolist() == array.tolist()


def test_a_tensor_takes_only_its_own_memory_along() -> None:
    encoder = Encoder()
    encoder.encode([torch.zeros(1_000_000)[::100_000], torch.zeros(1).expand(3)])
    assert len(encoder.tensors.data()) < 500


def test_what_is_one_object_stays_one() -> None:
    rows = [1]
    found = there_and_back({"a": rows, "b": (rows, {"rows": rows})})
    assert found["a"] is found["b"][0] is found["b"][1]["rows"]


def test_a_list_in_itself_comes_back() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    found = there_and_back(loop)
    assert found[1] is found


def test_named_tuples_of_torch_keep_their_names() -> None:
    found = there_and_back(torch.tensor([1.0, 3.0]).max(0))
    assert (found.values.item(), found.indices.item()) == (3.0, 1)
    value, index = found
    assert index.item() == 1


def test_an_output_comes_back_as_plain_data() -> None:
    output = RequestOutput("Hi", [1, 2], outputs=[], prompt_logprobs=[None, {5: Logprob(-1.0, 1, "x")}])
    assert there_and_back(output) == output


def test_references_are_resolved_by_the_receiver() -> None:
    found = there_and_back([torch, torch.float16, torch.device("cpu"), Encoder], resolve=lambda ref: ref)
    assert found == [ModuleRef("torch"), Dtype("float16"), Device("cpu"), Named("model")]
    with pytest.raises(WireError, match="stands for"):
        there_and_back(torch)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), r"`x` is object, which can't travel; numbers, texts, lists"),
        (json, r"`x` is a module, which can't travel; blocks that travel know the modules torch, .* what needs `json`"),
        (dict, r"`x` is type, which can't travel; classes stay here"),
        (print, r"of what can be called, functions of your own travel, as source"),
        (lambda: 1, r"functions don't come back"),
        (torch.zeros(2, dtype=torch.complex64), r"tensor of complex64, torch.strided, which can't travel"),
        (torch.zeros(2).to_sparse(), r"torch.sparse_coo, which can't travel"),
        (2**9000, r"int of 9001 bits"),
        ("\ud800", r"lone surrogates, which can't travel: encode it to bytes"),
        (numpy.array(["a"]), r"array of str32, which can't travel"),
    ],
)
def test_what_cannot_travel_is_refused_by_name_with_the_way_out(value: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Encoder().encode(value, "`x`")


def test_deep_nesting_is_refused_by_name() -> None:
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    with pytest.raises(ArgumentError, match="`x` is nested more than 60 deep"):
        Encoder().encode(deep, "`x`")


def test_frames_are_read_in_pieces() -> None:
    frames = [Frame({"n": n}, b"x" * n) for n in (0, 3, 1000)]
    data = b"".join(map(encode_frame, frames))
    reader = FrameReader()
    found = [frame for at in range(0, len(data), 7) for frame in reader.feed(data[at : at + 7])]
    reader.close()
    assert [(frame.header, bytes(frame.tensors)) for frame in found] == frames
    list(reader.feed(data[:20]))
    with pytest.raises(WireError, match="ended in the middle"):
        reader.close()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "malformed"),
        (b"HTTP" + bytes(12), "malformed"),
        (b"ISU1" + b"\xff" * 12, "too-large"),
        (b"ISU1" + bytes(12) + b"x", "malformed"),
    ],
)
def test_what_is_no_frame_is_refused(data: bytes, code: str) -> None:
    with pytest.raises(WireError) as caught:
        decode_frame(data)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "is a JSON object"),
        ('{"a": NaN}', "NaN is no JSON"),
        ('{"a": 1, "a": 2}', "a key comes twice"),
        ('{"a": ' + "[" * 100_000, "too deeply"),
        ('{"a": ' + "1" * 5000 + "}", "no JSON"),
        ("{", "no JSON"),
    ],
)
def test_what_is_no_json_of_ours_is_refused(text: str, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode_json(text.encode())


def test_events_come_back() -> None:
    saved = Saves(1, {"x": torch.ones(2)}, (1, 2), [("a.py", 3, None, "x")], ["rows"])
    for event in (Progress(1, 2, 3, 4), saved, Done()):
        found = decode_event(decode_frame(encode_frame(encode_event(event))))
        assert type(found) is type(event)
    assert isinstance(found, Done)
    again = decode_event(encode_event(saved))
    assert isinstance(again, Saves)
    assert again.values["x"].tolist() == [1, 1]
    assert (again.invoke, again.returned, again.lost) == (1, (1, 2), saved.lost)
    assert again.changed == ["rows"]


def test_an_error_comes_back_with_the_lines_of_the_client_alone() -> None:
    code = compile("\n\ndef deep():\n    return {}['k']\ndeep()\n", "<client>/home/me/a.py", "exec")
    try:
        exec(code, {})
    except KeyError as error:
        found = decode_event(encode_event(Failed(error, 2)))
    assert isinstance(found, Failed)
    assert (type(found.error), found.error.args, found.invoke) == (KeyError, ("k",), 2)
    entry, lines = found.error.__traceback__, []
    while entry is not None:
        lines.append((entry.tb_frame.f_code.co_filename, entry.tb_lineno, entry.tb_frame.f_code.co_name))
        entry = entry.tb_next
    assert lines == [("/home/me/a.py", 5, "<module>"), ("/home/me/a.py", 4, "deep")]


def test_an_error_of_a_foreign_class_comes_back_as_one_that_names_it() -> None:
    class OddError(Exception):
        pass

    found = decode_event(encode_event(Failed(OddError("why"))))
    assert isinstance(found, Failed)
    assert type(found.error).__name__ == "BlockError"
    assert "OddError: why" in str(found.error)


def test_a_client_needs_neither_torch_nor_numpy_for_plain_values() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['vllm'] = sys.modules['numpy'] = None\n"
        "import insitu.net as net\n"
        "event = net.Saves(0, {'x': [1, (2.5, {'a': b'c'})]})\n"
        "print(net.decode_event(net.decode_frame(net.encode_frame(net.encode_event(event)))).values)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{'x': [1, (2.5, {'a': b'c'})]}"


def test_a_tensor_named_twice_is_one_and_a_large_one_stays_where_it_arrived() -> None:
    large = torch.arange(5000.0)
    reader = FrameReader()
    (frame,) = reader.feed(encode_frame(encode_event(Saves(0, {"x": large, "y": large[:3]}, [large]))))
    saved = decode_event(frame, arrays="torch")
    assert isinstance(saved, Saves)
    assert saved.returned[0] is saved.values["x"]
    assert torch.equal(saved.values["x"], large)
    start = torch.frombuffer(frame.whole, dtype=torch.uint8).data_ptr()
    assert 0 <= saved.values["x"].data_ptr() - start < len(frame.whole)
    assert not 0 <= saved.values["y"].data_ptr() - start < len(frame.whole)
    saved.values["x"] += 1  # it can be written into
