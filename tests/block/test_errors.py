"""One tree of errors, which can be pickled and copied."""

from __future__ import annotations

import copy
import pickle

import pytest

import insitu.block as block
from insitu.block import errors

CLASSES = [getattr(errors, name) for name in errors.__all__ if name != "UnsavedWarning"]


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_copied_and_pickled(kind: type[errors.InsituError], again: object) -> None:
    error = kind("what was wrong")
    error.invoke = 3
    error.location = "model.layers.0.output"  # type: ignore[attr-defined]
    assert callable(again)
    other = again(error)
    assert type(other) is kind
    assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))
    assert other.invoke == 3


def test_syntax_error_keeps_its_place() -> None:
    error = errors.BlockSyntaxError("no", ("file.py", 3, 5, None))
    error.invoke = 1
    other = pickle.loads(pickle.dumps(error))
    assert (other.msg, other.filename, other.lineno, other.offset, other.invoke) == ("no", "file.py", 3, 5, 1)
    assert str(other) == "no (file.py, line 3)"


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.SourceError, RuntimeError),
        (errors.BlockSyntaxError, SyntaxError),
        (errors.OutsideTraceError, RuntimeError),
        (errors.OutOfOrderError, errors.LocationError),
        (errors.NotReachedError, errors.LocationError),
        (errors.UnknownModuleError, errors.LocationError),
        (errors.UnknownModuleError, AttributeError),
        (errors.SharedModuleError, errors.LocationError),
        (errors.LocationError, RuntimeError),
        (errors.WriteError, ValueError),
        (errors.PromptError, ValueError),
        (errors.ArgumentError, TypeError),
        (errors.EngineError, RuntimeError),
        (errors.RequestError, RuntimeError),
        (errors.BlockError, RuntimeError),
        (errors.UnsavedWarning, UserWarning),
    ],
)
def test_tree(kind: type, builtin: type) -> None:
    assert issubclass(kind, builtin)
    assert issubclass(kind, UserWarning) or issubclass(kind, errors.InsituError)
    assert getattr(block, kind.__name__) is kind


def test_drawing_names_every_class() -> None:
    assert errors.__doc__ is not None
    drawn = {word for line in errors.__doc__.splitlines() for word in line.split() if word.endswith(("Error", "ing"))}
    assert set(errors.__all__) <= drawn


def test_stand_in() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    name = f"{__name__}.test_stand_in.<locals>.OddError"
    assert str(errors.BlockError.standing_for(ZeroDivisionError("by zero"))) == "ZeroDivisionError: by zero"
    assert str(errors.BlockError.standing_for(KeyError())) == "KeyError"
    odd = errors.BlockError.standing_for(OddError())
    assert (str(odd), odd.original) == (f"{name}: <its message could not be made>", name)


def test_public_door() -> None:
    assert len(set(block.__all__)) == len(block.__all__)
    assert all(hasattr(block, name) for name in block.__all__)
    assert set(errors.__all__) <= set(block.__all__)
