"""What a cache records beside a plain torch module, and what it is like afterwards."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from insitu.block import ArgumentError, LocationError, NotReachedError, UnknownModuleError
from insitu.run import Cache
from insitu.run.cache import Records
from insitu.run.recorder import CacheRecorder
from insitu.tree import LOGITS, RESULT, SAMPLES, Place, session_for
from tests.run.packed import WIDTH, Packed, rows


@pytest.fixture
def packed() -> Packed:
    return Packed()


def start_cache(modules: Any = None, **settings: Any) -> Cache:
    defaults = {"inputs": False, "outputs": True, "device": "cpu", "dtype": None}
    return session_for("cache").cache(modules, **{**defaults, **settings})


def read(place):
    return session_for(str(place)).read(place)


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, (tuple, list)) else []


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and first.equal(second)
    if isinstance(first, (tuple, list)):
        return type(first) is type(second) and len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    return first == second


CALLED = ["layers.0.mlp", "layers.0.act", "layers.0", "layers.1.mlp", "layers.1.act", "layers.1"]


def test_equals_reading_the_same_places_one_by_one(packed: Packed) -> None:
    cache = packed.alone(rows(3), lambda: start_cache(inputs=True))
    assert list(cache) == ["layers.0", "layers.0.mlp", "layers.0.act", "layers.1", "layers.1.mlp", "layers.1.act"]
    assert list(packed.alone(rows(3), start_cache)) == CALLED  # by the first that is recorded of each
    for path in CALLED:
        node = packed.nodes.get(path)
        assert same(cache[path].output, packed.alone(rows(3), lambda node=node: node.output)), path
        assert same(cache[path].inputs, packed.alone(rows(3), lambda node=node: node.inputs)), path
        assert same(cache[path].input, packed.alone(rows(3), lambda node=node: node.input)), path


def test_records_this_request_s_rows_whatever_the_company(packed: Packed) -> None:
    inputs = [rows(n, start) for n, start in ((3, 1.0), (1, 50.0), (5, -7.0))]
    runs = [packed.run(start_cache), None, packed.run(start_cache)]
    packed.step(list(zip(inputs, runs, strict=True)))
    for hidden, run in zip(inputs, runs, strict=True):
        if run is not None:
            assert run.returned["layers.0.mlp"].output.equal(hidden * 2)
            assert run.returned["layers.1.mlp"].output.equal(hidden * 9)


def test_values_are_ordinary_tensors_that_own_their_memory(packed: Packed) -> None:
    cache = packed.alone(rows(3), lambda: start_cache(inputs=True))
    found = [tensor for path in cache for tensor in tensors_in([cache[path].output, cache[path].inputs])]
    assert len(found) > 10
    for tensor in found:
        assert not tensor.is_inference()
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        tensor.add_(1).requires_grad_().sum().backward()
    assert len({tensor.data_ptr() for tensor in found}) == len(found)


def test_the_block_s_own_edits_are_in_what_is_recorded(packed: Packed) -> None:
    def block():
        cache = start_cache(inputs=True)
        packed.nodes.layers[0].mlp.output[:] = 1
        packed.nodes.layers[1].mlp.output = torch.full((2, WIDTH), 5.0)
        return cache

    def other():
        cache = start_cache()
        packed.nodes.layers[0].mlp.output[:] = -1
        return cache

    first, second = packed.run(block), packed.run(other)
    packed.step([(rows(2), first), (rows(2), second)])
    assert (first.returned["layers.0.mlp"].output == 1).all()
    assert (second.returned["layers.0.mlp"].output == -1).all()
    assert (first.returned["layers.0"].output[0] == 1).all()
    assert first.returned["layers.1.mlp"].input.equal(rows(2) + 1)
    assert (first.returned["layers.1.mlp"].output == 5).all()
    assert second.returned["layers.1.mlp"].output.equal((rows(2) - 1) * 3)


def test_every_step_is_recorded_also_after_the_block_has_ended(packed: Packed) -> None:
    run = packed.run(lambda: start_cache("layers.*"))
    for step in range(3):
        packed.step([(rows(2 if step == 0 else 1, step), run)])
        assert run.done
    packed.interleaver.finish(run, "done")
    layer = run.returned["layers.1"]
    assert layer.steps == [0, 1, 2]
    assert [len(residual) for _, residual in layer.output] == [2, 1, 1]
    for step, (_, residual) in enumerate(layer.output):
        assert residual.equal(rows(2 if step == 0 else 1, step) * 3)


def test_begins_with_the_place_at_which_the_block_is(packed: Packed) -> None:
    def block():
        held = packed.nodes.layers[0].output
        cache = start_cache(inputs=True)
        held[0][:] = 7
        return cache

    cache = packed.alone(rows(2), block)
    assert list(cache) == ["layers.0", "layers.1", "layers.1.mlp", "layers.1.act"]
    assert (cache["layers.0"].output[0] == 7).all()
    with pytest.raises(LocationError, match=r"`layers.0.input` was not recorded: this cache has `layers.0.output`"):
        cache["layers.0"].inputs


def test_begun_late_in_a_step_it_has_the_steps_after_it(packed: Packed) -> None:
    def after_samples():
        read(SAMPLES)
        return start_cache("layers.0")

    def next_step():
        session_for("next").move_on()
        return start_cache("layers.0")

    for block in (after_samples, next_step):
        run = packed.run(block)
        for step in range(3):
            packed.step([(rows(1, step), run)])
        assert run.returned["layers.0"].steps == [1, 2]


def test_nothing_is_held_up_and_nothing_is_left_wrapped(packed: Packed) -> None:
    def block():
        cache = start_cache()
        logits = read(LOGITS)
        late = start_cache()  # the forward is over
        assert read(RESULT) == "done"
        return cache, late, logits

    cache, late, logits = packed.alone(rows(2), block)
    assert set(cache) == set(CALLED)
    assert len(late) == 0
    assert logits.shape[0] == 1
    assert not any("forward" in module.__dict__ for module in packed.model.modules())


def test_calls_on_values_of_the_block_are_not_recorded(packed: Packed) -> None:
    def block():
        cache = start_cache("**.mlp")
        packed.nodes.layers[0].mlp(torch.zeros(1, WIDTH))
        packed.nodes.layers[1].mlp.output
        packed.nodes.layers[0].mlp(torch.zeros(1, WIDTH))
        return cache

    cache = packed.alone(rows(2), block)
    assert [cache[path].steps for path in cache] == [[0], [0]]


def test_a_module_shared_by_layers_is_recorded_under_each_path(packed: Packed) -> None:
    cache = packed.alone(rows(2), lambda: start_cache("layers.1.act"))
    assert list(cache) == ["layers.1.act"]
    assert cache["layers.1.act"].output.equal(rows(2) * 9)


def test_of_a_skipped_module_the_value_is_recorded_and_nothing_inside_it(packed: Packed) -> None:
    def block():
        cache = start_cache(inputs=True)
        packed.nodes.layers[0].skip((torch.full((2, WIDTH), 5.0), torch.zeros(2, WIDTH)))
        return cache

    skipping, other = packed.run(block), packed.run(start_cache)
    packed.step([(rows(2), skipping), (rows(3), other)])
    assert list(skipping.returned) == ["layers.0", "layers.1", "layers.1.mlp", "layers.1.act"]
    assert skipping.returned["layers.0"].input.equal(rows(2))
    assert (skipping.returned["layers.0"].output[0] == 5).all()
    assert (skipping.returned["layers.1.mlp"].output == 15).all()
    assert set(other.returned) == set(CALLED)


def test_two_caches_and_a_failing_block(packed: Packed) -> None:
    def block():
        return start_cache("layers.0"), start_cache("layers.0", dtype=torch.float64)

    def fails():
        start_cache()
        packed.nodes.never.output

    good, bad = packed.run(block), packed.run(fails)
    packed.step([(rows(2), good), (rows(3), bad)])
    packed.step([(rows(1), good), (rows(1), bad)])
    assert isinstance(bad.error, NotReachedError)
    first, second = good.returned
    assert first["layers.0"].steps == second["layers.0"].steps == [0, 1]
    assert first["layers.0"].output[0][1].dtype == torch.float32
    assert second["layers.0"].output[0][1].dtype == torch.float64


def test_a_value_that_can_t_be_kept_fails_its_own_request_alone(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def block():
        start_cache("layers.1.mlp")
        return read(LOGITS)

    def full(self: CacheRecorder, *_: Any) -> None:
        raise RuntimeError("not enough memory")

    failing, ended, fine = packed.run(block), packed.run(lambda: start_cache()), packed.run(lambda: read(LOGITS))
    monkeypatch.setattr(CacheRecorder, "record", full)
    packed.step([(rows(2), failing), (rows(1), ended), (rows(1), fine)])
    for run in (failing, ended):
        assert run.done
        assert str(run.error) == "not enough memory"
    assert fine.error is None
    assert fine.returned.shape[0] == 1


def test_dtype_converts_floating_values_alone() -> None:
    class Ids(torch.nn.Module):
        def forward(self, hidden):
            return {"hidden": hidden, "ids": hidden.long(), "note": "x", "none": None, "model": self}

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Ids()

        def forward(self, hidden):
            return self.inner(hidden)["hidden"]

    output = Packed(Model()).alone(rows(2), lambda: start_cache(dtype=torch.bfloat16))["inner"].output
    assert output["hidden"].dtype == torch.bfloat16
    assert output["ids"].dtype == torch.int64
    assert (output["note"], output["none"], output["model"]) == ("x", None, "<Ids>")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"outputs": False}, "inputs=True or outputs=True"),
        ({"device": "nowhere"}, "device 'nowhere'"),
        ({"dtype": "bfloat16"}, "got 'bfloat16'"),
        ({"dtype": torch.int8}, "got torch.int8"),
        ({"modules": []}, "empty list"),
    ],
)
def test_wrong_settings_are_refused_where_they_are_given(
    packed: Packed, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        packed.alone(rows(1), lambda: start_cache(**settings))


def test_an_unknown_pattern_names_the_nearest(packed: Packed) -> None:
    with pytest.raises(UnknownModuleError, match=r"`layer.\*.mlp`; the nearest is `layers.\*.mlp`"):
        packed.alone(rows(1), lambda: start_cache("layer.*.mlp"))


# -- the cache afterwards -----------------------------------------------------------------


@pytest.fixture
def cache(packed: Packed) -> Cache:
    run = packed.run(lambda: start_cache("layers.**", inputs=True))
    packed.step([(rows(3), run)])
    packed.step([(rows(1), run)])
    return run.returned


def test_is_a_mapping_and_a_tree(packed: Packed, cache: Cache) -> None:
    assert len(cache) == len(CALLED)
    assert list(cache.keys()) == list(cache)
    assert [same(value.output, cache[path].output) for path, value in cache.items()] == [True] * len(CALLED)
    assert "layers.0" in cache
    assert packed.nodes.layers[0] in cache
    assert "layers" not in cache
    assert packed.nodes.never not in cache
    assert cache.get("never") is None
    mlp = cache["layers.1.mlp"]
    for other in (cache.layers[1].mlp, cache.layers[-1].mlp, cache[packed.nodes.layers[1].mlp]):
        assert same(other.output, mlp.output)
    assert [same(one.output, cache[f"layers.{i}"].output) for i, one in enumerate(cache.layers)] == [True, True]
    assert len(cache.layers[1:]) == 1
    assert "layers" in dir(cache)
    assert "mlp" in dir(cache.layers[0])


def test_a_part_of_a_list_keeps_its_indices(packed: Packed) -> None:
    cache = packed.alone(rows(1), lambda: start_cache("layers.0.mlp"))
    with pytest.raises(UnknownModuleError, match=r"no module `layers.1`; here it has 0"):
        cache.layers[-1]
    with pytest.raises(IndexError, match="`layers` has 2 modules; got index 2"):
        cache.layers[2]
    assert [len(one.mlp.output) for one in cache.layers] == [1]


def test_what_is_not_there_is_said(cache: Cache) -> None:
    with pytest.raises(KeyError, match=r"`layers.0.mpl` is not in this cache.*`layers.0.mlp`"):
        cache["layers.0.mpl"]
    with pytest.raises(AttributeError, match="no module `layer`; here it has layers"):
        cache.layer
    with pytest.raises(LocationError, match=r"`layers.output` was not recorded"):
        cache.layers.output


def test_repr_shows_modules_and_shapes(cache: Cache) -> None:
    shown = repr(cache)
    assert shown.startswith("Cache of 6 modules\n  layers.0")
    assert "layers.0.act: input (([3, 4] float32), {}); output [3, 4] float32 and 1 more" in shown
    many = Records({})
    for i in range(100):
        many.add(Place(f"layers.{i}", "output"), 0, torch.zeros(1, 2))
    lines = repr(Cache(many)).splitlines()
    assert lines[0] == "Cache of 100 modules"
    assert len(lines) == 17
    assert lines[-2] == "  ... 85 more"
    assert lines[-1] == "  layers.99: output [1, 2] float32"


Pair = namedtuple("Pair", "first second")


def assert_equal_caches(first: Cache, second: Cache) -> None:
    assert list(first) == list(second)
    for path in first:
        assert first[path].steps == second[path].steps
        assert same(first[path].output, second[path].output)
        assert same(first[path].inputs, second[path].inputs)
    assert len(first.layers[:]) == len(second.layers[:])
    assert first.layers[-1].steps == second.layers[-1].steps


def test_pickles_and_copies(cache: Cache) -> None:
    assert_equal_caches(cache, pickle.loads(pickle.dumps(cache)))
    assert_equal_caches(cache, copy.deepcopy(cache))


def test_goes_to_safetensors_and_back(cache: Cache, tmp_path: Path) -> None:
    file = tmp_path / "cache.safetensors"
    cache.save_safetensors(file)
    assert_equal_caches(cache, Cache.load_safetensors(file))
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as opened:
        names = set(opened.keys())
    assert {"layers.1/output/0/0", "layers.1/output/1/1", "layers.0.mlp/output/0"} <= names


def test_any_structure_goes_to_safetensors_and_back(tmp_path: Path) -> None:
    records = Records({"a": 2})
    value = {"x": [torch.ones(2, dtype=torch.bfloat16), None, 3, "text"], "y": (), "z": torch.tensor(True)}
    records.add(Place("a.0", "output"), 5, value)
    records.add(Place("a.0", "output"), 5, Pair(torch.zeros(0, 3), 1.5))
    Cache(records).save_safetensors(tmp_path / "x")
    back = Cache.load_safetensors(tmp_path / "x")
    assert back.a[0].steps == [5, 5]
    assert same(back.a[-2].output[0], value)
    assert same(back.a[0].output[1], (torch.zeros(0, 3), 1.5))


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(1)}, tmp_path / "weights")
    with pytest.raises(ArgumentError, match=r"weights.*not written by Cache.save_safetensors"):
        Cache.load_safetensors(tmp_path / "weights")
    (tmp_path / "text").write_text("hello, this is no such file")
    with pytest.raises(ArgumentError, match="no safetensors file"):
        Cache.load_safetensors(tmp_path / "text")
