"""Messages between two ends: what arrives is what was sent, and nothing is kept."""

from __future__ import annotations

import errno
import gc
import importlib
import os
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import insitu
from insitu.block import BlockError
from insitu.wire import Port

BIG = torch.arange(40_000, dtype=torch.float32).reshape(4, -1)


def ends() -> tuple[Port, Port]:
    one, other = Port(lambda obj: None, lambda name: None), Port(lambda obj: None, lambda name: None)
    one.unpack(other.pack(None))  # each has heard of the other
    return one, other


def sent(value: Any) -> Any:
    one, other = ends()
    return other.unpack(one.pack(value))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0, 5),
        torch.randn(3, 4, dtype=torch.bfloat16),
        torch.randn(3, 4).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
        torch.arange(6).reshape(2, 3).T,
        torch.ones(1, 3).expand(5, 3),
        torch.randn(2, 2, dtype=torch.complex64),
        BIG,
        BIG[:, ::2],
    ],
    ids=["scalar", "empty", "bfloat16", "float8", "bool", "transposed", "expanded", "complex", "big", "strided"],
)
def test_tensors_arrive_whole_and_are_ordinary(tensor: torch.Tensor) -> None:
    got = sent({"x": [tensor]})["x"][0]
    assert got.dtype == tensor.dtype
    assert got.shape == tensor.shape
    assert torch.equal(got.view(torch.uint8) if got.dim() else got, _bytes(tensor))
    got.zero_()
    assert not got.is_inference()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor


def test_what_was_one_object_is_one_object() -> None:
    first, second = sent([BIG, BIG])
    assert first is second


def test_parameters_and_leaves_keep_their_kind() -> None:
    leaf = torch.ones(3, requires_grad=True)
    parameter, got = sent((torch.nn.Parameter(torch.ones(2), requires_grad=False), leaf))
    assert isinstance(parameter, torch.nn.Parameter)
    assert not parameter.requires_grad
    assert got.requires_grad
    (got * 2).sum().backward()
    assert got.grad.tolist() == [2, 2, 2]


def test_large_tensors_are_not_in_the_message_and_their_memory_is_given_back() -> None:
    one, other = ends()
    files = len(os.listdir("/proc/self/fd"))
    message = one.pack(BIG)
    assert len(message) < 1000
    assert one.lent == 1
    got = other.unpack(message)
    one.unpack(other.pack("thanks"))
    assert one.lent == 0
    assert len(os.listdir("/proc/self/fd")) == files  # what has arrived keeps no file open
    assert torch.equal(got, BIG)
    del got
    assert mapped() == 0


def mapped() -> int:
    """Bytes of what has arrived in memory of its own."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if "memfd:insitu" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)


@pytest.mark.parametrize("cores", [1, 3])
@pytest.mark.parametrize(
    "sizes",
    [[9_000_000], [1, 70_000, 9_000_000, 65_536, 65_535, 0, 4_300_000, 65_537], [100_000] * 90, [2**20] * 40],
    ids=["one", "all sorts", "many", "pages"],
)
def test_what_lies_in_several_files_arrives_whole(
    sizes: list[int], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written by one thread, or by several."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    generator = np.random.default_rng(len(sizes))
    values = [generator.integers(0, 256, size, np.uint8) for size in sizes]
    files = len(os.listdir("/proc/self/fd"))
    one, other = ends()
    message = one.pack(values)
    assert len(os.listdir("/proc/self/fd")) >= files + 2
    got = other.unpack(message)
    one.unpack(other.pack(None))
    for thread in threading.enumerate():
        if thread.name == "insitu-close":
            thread.join()
    assert len(os.listdir("/proc/self/fd")) == files
    assert all(np.array_equal(each, value) for each, value in zip(got, values, strict=True))
    for each in got:
        each[...] = 0
    del each, got
    assert mapped() == 0


def test_one_value_that_is_kept_does_not_keep_the_memory_of_all() -> None:
    kept = sent([torch.ones(2**20) for _ in range(16)])[5]
    assert kept.nbytes <= mapped() <= 2**23
    assert kept.sum() == 2**20


def test_memory_that_can_t_be_had_is_an_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = ends()
    files = len(os.listdir("/proc/self/fd"))

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        one.pack([BIG, torch.ones(2**22)])
    assert one.lent == 0
    assert len(os.listdir("/proc/self/fd")) == files


def test_to_another_machine_all_is_in_the_message() -> None:
    one, other = Port(lambda obj: None, lambda name: None), Port(lambda obj: None, lambda name: None)
    message = one.pack(BIG)  # it has heard of nobody
    assert len(message) > BIG.nbytes
    assert torch.equal(other.unpack(message), BIG)


class OddError(Exception):
    def __init__(self, place: str, *, got: int) -> None:
        super().__init__(f"{place} got {got}")
        self.got = got

    def __reduce__(self) -> Any:
        return _odd, (self.args[0].partition(" ")[0], self.got)


def _odd(place: str, got: int) -> OddError:
    return OddError(place, got=got)


class StuckError(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def raised(error: BaseException) -> BaseException:
    try:
        try:
            {}["first"]
        except KeyError as cause:
            raise error from cause
    except BaseException as caught:
        return caught


def test_errors_keep_class_message_notes_cause_and_lines() -> None:
    error = raised(OddError("here", got=3))
    error.__dict__["invoke"] = 4
    got = sent(error)
    assert isinstance(got, OddError)
    assert (str(got), got.got) == ("here got 3", 3)
    assert isinstance(got.__cause__, KeyError)
    line = got.__traceback__
    assert (line.tb_frame.f_code.co_name, line.tb_frame.f_code.co_filename) == ("raised", __file__)
    assert line.tb_lineno == raised.__code__.co_firstlineno + 5


def test_a_missing_attribute_keeps_its_name() -> None:
    with pytest.raises(AttributeError) as caught:
        torch.ones(1).nothing
    assert sent(caught.value).name == "nothing"


def test_an_error_that_can_t_travel_is_named() -> None:
    got = sent(raised(StuckError()))
    assert isinstance(got, BlockError)
    assert got.original.endswith("test_port.StuckError")
    assert str(got).endswith("StuckError: holds a lock")
    assert got.__traceback__ is not None


def test_errors_of_the_library_arrive_as_themselves() -> None:
    error = insitu.PromptError("empty")
    error.invoke = 3
    got = sent(error)
    assert type(got) is insitu.PromptError
    assert got.invoke == 3


def test_functions_classes_and_closures_of_user_files_travel_as_code() -> None:
    factor = 3
    message = ends()[0].pack(lambda x: _twice(x) * factor)
    assert b"_twice" in message
    assert ends()[1].unpack(message)(2) == 12


def _twice(x: int) -> int:
    return 2 * x


class KeywordError(Exception):
    def __init__(self, *, place: str, reason: str = "") -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place


class RequiredError(ValueError):
    def __init__(self, first: str, second: int) -> None:
        super().__init__(f"{first} {second}")
        self.second = second


def test_errors_whose_constructor_takes_something_else() -> None:
    got = sent(KeywordError(place="layer 3", reason="odd"))
    assert type(got) is KeywordError
    assert (str(got), got.place) == ("layer 3: odd", "layer 3")
    got = sent(RequiredError("a", 2))
    assert type(got) is RequiredError
    assert (str(got), got.second) == ("a 2", 2)


def deeper(depth: int) -> int:
    return deeper(depth + 1) + 1


def test_a_recursion_error_arrives_as_one() -> None:
    with pytest.raises(RecursionError) as caught:
        deeper(0)
    got = sent(caught.value)
    assert type(got) is RecursionError
    assert str(got) == str(caught.value)
    lines = traceback.extract_tb(got.__traceback__)
    assert len(lines) == 100
    assert lines[0].name == "test_a_recursion_error_arrives_as_one"
    assert lines[-1].line == "return deeper(depth + 1) + 1"


def test_a_class_that_comes_back_is_left_as_it_is() -> None:
    constructor = KeywordError.__init__
    sent(KeywordError(place="here"))
    assert KeywordError.__init__ is constructor


@pytest.mark.parametrize("installed", [True, False], ids=["installed", "the user's"])
def test_what_is_installed_elsewhere_travels_by_its_name(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a folder of PYTHONPATH, as by `pip install --target`."""
    name = f"somewhere_{installed}".lower()
    (tmp_path / f"{name}.py").write_text("def f(): return 1\n")
    if installed:
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module(name).f
    assert (sent(function) is function) == installed
    assert sent(function)() == 1
