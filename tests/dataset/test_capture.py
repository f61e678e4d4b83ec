"""What a capture writes is what transformers computes, wherever the data comes from and whenever it was stopped."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

import insitu
from insitu import ArgumentError, Captured, CaptureError, UnknownModuleError
from insitu.dataset import store
from insitu.dataset.plan import Estimate
from insitu.dataset.tokens import Tokens
from tests import models
from tests.engine.helpers import assert_close

pytestmark = pytest.mark.in_process


def capture(*args: Any, **settings: Any) -> Any:
    return insitu.capture(*args, progress=False, **settings)


def stream(folder: str, text: str, layer: int) -> torch.Tensor:
    return models.hf_residuals(models.oracle(folder), models.encode(folder, text)).resid_post[layer]


def assert_same(one: Captured, other: Captured) -> None:
    assert one.index.to_pylist() == other.index.to_pylist()
    for shard in set(one.index["shard"].to_pylist()):
        mine, theirs = load_file(str(one.folder / shard)), load_file(str(other.folder / shard))
        assert mine.keys() == theirs.keys()
        assert all(value.equal(theirs[place]) for place, value in mine.items())


@pytest.fixture
def data(tmp_path: Path, texts: list[str], request: pytest.FixtureRequest) -> Any:
    form, folder = request.param, tmp_path / "data"
    folder.mkdir()
    rows = [{"id": f"row {number}", "text": text} for number, text in enumerate(texts)]
    if form == "list":
        return texts
    if form == "rows":
        return rows
    if form == "ids":
        return [models.encode(models.tiny("llama"), text) for text in texts]
    if form == "datasets":
        import datasets

        return datasets.Dataset.from_list(rows)
    if form == "text":
        (folder / "a.txt").write_text("\n".join(texts) + "\n")
        return folder / "a.txt"
    if form == "folder":
        (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
        (folder / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[4:]))
        return folder
    if form == "csv":
        (folder / "a.csv").write_text("id,text\n" + "".join(f"{row['id']},{row['text']}\n" for row in rows))
        return str(folder / "a.csv")
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
    return folder / "a.parquet"


@pytest.mark.parametrize("data", ["list", "rows", "ids", "datasets", "text", "folder", "csv", "parquet"], indirect=True)
def test_values_are_those_of_transformers_wherever_the_data_comes_from(
    model: Any, folder: str, texts: list[str], data: Any, tmp_path: Path
) -> None:
    # Asked for in another order than the forward's.
    found = capture(model, data, at=["resid_post[1:3]", "model.embed_tokens.output"], out=tmp_path / "out")
    assert found.places == ["model.embed_tokens.output", "resid_post[1]", "resid_post[2]"]
    assert len(found) == len(texts)
    for number, text in enumerate(texts):
        row = found["resid_post[2]"][number]
        assert row.tokens == models.encode(folder, text)
        assert row.positions == list(range(len(row.tokens)))
        assert row.prompt_tokens == len(row.tokens)
        assert_close(row.values, stream(folder, text, 2))


def test_plain_safetensors_and_pyarrow_read_it(model: Any, folder: str, texts: list[str], tmp_path: Path) -> None:
    capture(model, texts, at="resid_post[1]", out=tmp_path / "out")
    index = pq.read_table(tmp_path / "out" / "shard-00000.parquet").to_pylist()
    tensors = load_file(str(tmp_path / "out" / "shard-00000.safetensors"))
    row = index[3]
    values = tensors[row["place"]][row["start"] : row["start"] + row["rows"]]
    assert_close(values, stream(folder, texts[3], 1))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["complete"]
    assert manifest["prompts"] == len(texts)
    assert manifest["versions"]["insitu"] == insitu.__version__
    assert manifest["model"] == folder


@pytest.mark.parametrize(
    ("positions", "kept"),
    [("last", slice(-1, None)), (0, slice(0, 1)), (-2, slice(-2, -1)), ("1:3", slice(1, 3)), (slice(2), slice(2))],
)
def test_some_positions(model: Any, folder: str, texts: list[str], tmp_path: Path, positions: Any, kept: slice) -> None:
    found = capture(model, texts, at="resid_post[0]", out=tmp_path, positions=positions)
    for number, text in enumerate(texts):
        row, count = found["resid_post[0]"][number], len(models.encode(folder, text))
        assert row.positions == list(range(count))[kept]
        assert_close(row.values, stream(folder, text, 0)[kept])


def test_the_positions_of_a_text(model: Any, folder: str, texts: list[str], tmp_path: Path) -> None:
    found = capture(model, texts, at="resid_post[0]", out=tmp_path, positions="text:mat")
    for number, text in enumerate(texts):
        where = model.positions_of("mat", text)
        row = found["resid_post[0]"][number]
        assert row.positions == list(where)
        assert_close(row.values, stream(folder, text, 0)[list(where)])


@pytest.mark.parametrize("phase", ["generated", "all"])
def test_generated_tokens(model: Any, folder: str, texts: list[str], tmp_path: Path, phase: Any) -> None:
    settings = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
    found = capture(model, texts[:3], at=["resid_post[1]", "logits"], out=tmp_path, phase=phase, **settings)
    for number, text in enumerate(texts[:3]):
        ids = models.encode(folder, text)
        row, logits = found["resid_post[1]"][number], found["logits"][number]
        assert row.tokens == [*ids, *models.greedy(folder, ids, 4)]
        first = 0 if phase == "all" else len(ids)
        assert row.positions == list(range(first, len(ids) + 3))
        whole = models.hf_residuals(models.oracle(folder), row.tokens[:-1]).resid_post[1]
        assert_close(row.values, whole[first:])
        assert logits.positions == list(range(len(ids) - (phase == "all"), len(ids) + 3))
        assert logits.values.argmax(-1).tolist() == row.tokens[-len(logits.values) :]


def test_a_generation_of_one_token_has_no_rows(model: Any, texts: list[str], tmp_path: Path) -> None:
    found = capture(model, texts[:2], at="resid_post[1]", out=tmp_path, phase="generated", max_tokens=1)
    assert [len(found["resid_post[1]"][number].values) for number in range(2)] == [0, 0]
    assert len(found["resid_post[1]"][0].tokens) == found["resid_post[1]"][0].prompt_tokens + 1


def test_functions_of_the_rows(model: Any, folder: str, texts: list[str], tmp_path: Path) -> None:
    directions = torch.randn(2, 128)
    save_file({"directions": directions}, str(tmp_path / "d.safetensors"))
    (tmp_path / "f.py").write_text("def doubled(rows):\n    return rows * 2\n")
    shapes = {"W_enc": (128, 40), "b_enc": (40,), "W_dec": (40, 128), "b_dec": (128,)}
    sae = {name: torch.randn(shape) / 10 for name, shape in shapes.items()}
    save_file(sae, str(tmp_path / "sae.safetensors"))
    wanted = stream(folder, texts[0], 1)
    rows = list(range(len(wanted)))
    given = {
        "mean": (wanted.mean(0, keepdim=True), None),
        f"project:{tmp_path / 'd.safetensors'}": (wanted @ directions.T, rows),
        f"sae:{tmp_path / 'sae.safetensors'}": (
            ((wanted - sae["b_dec"]) @ sae["W_enc"] + sae["b_enc"]).relu(),
            rows,
        ),
        f"{tmp_path / 'f.py'}:doubled": (wanted * 2, None),
    }
    for number, (apply, (value, positions)) in enumerate(given.items()):
        found = capture(model, texts, at="resid_post[1]", out=tmp_path / str(number), apply=apply)
        assert found["resid_post[1]"][0].positions == positions
        torch.testing.assert_close(found["resid_post[1]"][0].values, value, rtol=1e-4, atol=1e-4)
    own = capture(model, texts, at="attn_pattern[0]", out=tmp_path / "own", apply=lambda pattern: pattern[:, -1, :3])
    assert own["attn_pattern[0]"][0].values.shape == (4, 3)


def test_another_dtype(model: Any, folder: str, texts: list[str], tmp_path: Path) -> None:
    found = capture(model, texts, at="resid_post[1]", out=tmp_path, dtype="float16")
    values = found["resid_post[1]"][0].values
    torch.testing.assert_close(values, stream(folder, texts[0], 1).half(), rtol=1e-3, atol=1e-3)


def test_empty_prompts_have_no_rows_and_keep_their_numbers(model: Any, folder: str, tmp_path: Path) -> None:
    found = capture(model, ["", "the cat", "", "sat"], at="resid_post[0]", out=tmp_path)
    rows = [found["resid_post[0]"][number] for number in range(4)]
    counts = [0, len(models.encode(folder, "the cat")), 0, len(models.encode(folder, "sat"))]
    assert [len(row.tokens) for row in rows] == counts
    assert [len(row.values) for row in rows] == counts
    assert [row.id for row in rows] == ["0", "1", "2", "3"]


def test_loaders_get_prompts_and_rows(model: Any, folder: str, texts: list[str], tmp_path: Path) -> None:
    found = capture(model, texts, at="resid_post[1]", out=tmp_path, shard_bytes=1)
    every = torch.cat([stream(folder, text, 1) for text in texts])
    rows = found["resid_post[1]"].rows
    assert len(rows) == len(every)
    batches = list(DataLoader(rows, batch_size=16))
    assert_close(torch.cat(batches), every)
    two = next(iter(DataLoader(found["resid_post[1]"], batch_size=2, collate_fn=list, num_workers=1)))
    assert [row.id for row in two] == ["0", "1"]


def files(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def prompts_and_bytes(folder: Path) -> list[tuple[int, int]]:
    """Of each shard."""
    return [
        (len(set(pq.read_table(file)["number"].to_pylist())), sum(value.nbytes for value in values.values()))
        for file in sorted(folder.glob("shard-*.parquet"))
        for values in [load_file(str(file.with_suffix(".safetensors")))]
    ]


@pytest.mark.parametrize("window_tokens", [None, 40])
def test_a_shard_is_as_large_as_was_said(
    model: Any, folder: str, texts: list[str], tmp_path: Path, window_tokens: int | None
) -> None:
    settings: dict[str, Any] = {"at": "resid_post[1:3]", "window_tokens": window_tokens}
    each = [len(models.encode(folder, text)) * 2 * 128 * 4 for text in texts]
    most = 2 * max(each)
    assert capture(model, texts, out=tmp_path, shard_bytes=most, dry_run=True, **settings).shards > 3
    capture(model, texts, out=tmp_path, shard_bytes=most, **settings)
    shards = prompts_and_bytes(tmp_path)
    assert sum(size for _, size in shards) == sum(each)
    ends = [sum(count for count, _ in shards[:number]) for number in range(1, len(shards) + 1)]
    for (_, size), end in zip(shards, ends, strict=True):
        assert size <= most
        assert end == len(texts) or size + each[end] > most
    assert capture(model, texts, out=tmp_path / "dry", shard_bytes=most, dry_run=True, **settings).shards == len(shards)


def test_a_prompt_larger_than_a_shard_has_one_of_its_own(model: Any, texts: list[str], tmp_path: Path) -> None:
    capture(model, texts, at="resid_post[1]", out=tmp_path, shard_bytes=1)
    assert [count for count, _ in prompts_and_bytes(tmp_path)] == [1] * len(texts)


# -- stopped and gone on with -----------------------------------------------------------------


@pytest.mark.parametrize("shard_bytes", [3000, 10_000, 30_000])
@pytest.mark.parametrize("stopped_at", range(1, 5))
def test_goes_on_where_it_was_stopped(
    model: Any, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_at: int, shard_bytes: int
) -> None:
    settings: dict[str, Any] = {"at": "resid_post[1:3]", "shard_bytes": shard_bytes, "window_tokens": 40}
    whole = capture(model, texts, out=tmp_path / "whole", **settings)
    ran: list[int] = []
    run = type(model).run

    def stopped(self: Any, function: Any, prompts: Any, **settings: Any) -> Any:
        ran.append(len(prompts))
        if len(ran) == stopped_at + 2:
            raise KeyboardInterrupt
        return run(self, function, prompts, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "run", stopped)
        with pytest.raises(KeyboardInterrupt):
            capture(model, texts, out=tmp_path / "out", **settings)
    with pytest.raises(CaptureError, match="not complete"):
        Captured(tmp_path / "out")
    (tmp_path / "out" / ".partial").mkdir()
    (tmp_path / "out" / ".partial" / "shard-00099.safetensors").write_bytes(b"half")
    again = capture(model, texts, out=tmp_path / "out", **settings)
    assert_same(again, whole)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_going_on_tokenises_and_runs_only_what_is_left(
    model: Any, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ran: list[int] = []
    ids, run = Tokens._ids, type(model).run

    def noted(self: Any, values: list[Any]) -> Any:
        asked.extend(values)
        return ids(self, values)

    def stopped(self: Any, function: Any, prompts: Any, **settings: Any) -> Any:
        ran.append(len(prompts))
        if len(ran) == 6:
            raise KeyboardInterrupt
        return run(self, function, prompts, **settings)

    settings = {"at": "resid_post[1]", "out": tmp_path, "shard_bytes": 1, "window_tokens": 30}
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "run", stopped)
        with pytest.raises(KeyboardInterrupt):
            capture(model, texts, **settings)
    committed = len(Captured(tmp_path, partial=True))
    assert 2 < committed < len(texts) - 2
    assert ran[:2] == [1, ran[1]]  # one place: the first prompt is run once, for its sizes
    monkeypatch.setattr(Tokens, "_ids", noted)
    capture(model, texts, **settings)
    assert asked == [texts[0], *texts[committed - 1 :]]


def test_a_finished_capture_runs_nothing(model: Any, texts: list[str], tmp_path: Path) -> None:
    first = capture(model, texts, at="resid_post[1]", out=tmp_path)
    before = (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns
    assert_same(capture(model, texts, at="resid_post[1]", out=tmp_path), first)
    assert (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("change", "text"),
    [({"at": "resid_post[2]"}, "places"), ({"positions": "last"}, "positions"), ({"dtype": "float16"}, "dtype")],
)
def test_other_arguments_are_another_capture(
    model: Any, texts: list[str], tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    capture(model, texts, at="resid_post[1]", out=tmp_path)
    with pytest.raises(CaptureError, match=text):
        capture(model, texts, **{"at": "resid_post[1]", "out": tmp_path, **change})


@pytest.mark.parametrize("other", [lambda texts: texts[1:], lambda texts: [*texts, "more"], lambda texts: texts[:-1]])
def test_other_data_is_another_capture(model: Any, texts: list[str], tmp_path: Path, other: Any) -> None:
    capture(model, texts, at="resid_post[1]", out=tmp_path)
    with pytest.raises(CaptureError, match=r"other data|has more"):
        capture(model, other(texts), at="resid_post[1]", out=tmp_path)


def test_two_at_once_are_refused(model: Any, texts: list[str], tmp_path: Path) -> None:
    held = store.Store(tmp_path, ["resid_post[1]"], {}, 1)
    with pytest.raises(CaptureError, match="another process"):
        capture(model, texts, at="resid_post[1]", out=tmp_path)
    held.close()


@pytest.mark.parametrize("full_at", [1, 2, 3])
def test_a_full_disk_loses_nothing(
    model: Any, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_at: int
) -> None:
    settings: dict[str, Any] = {"at": "resid_post[1:3]", "shard_bytes": 10_000, "window_tokens": 30}
    whole = capture(model, texts, out=tmp_path / "whole", **settings)
    written: list[str] = []
    write = store.save_file

    def on_a_small_disk(tensors: Any, file: Any) -> None:
        written.append(file)
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        if len(written) == full_at:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
        try:
            write(tensors, file)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

    with monkeypatch.context() as patch:
        patch.setattr(store, "save_file", on_a_small_disk)
        with pytest.raises(CaptureError, match=r"disk is full.*are safe: make room and run the same"):
            capture(model, texts, out=tmp_path / "out", **settings)
    left = sorted(file.name for file in (tmp_path / "out").glob("shard-*.*"))
    assert len(left) == 2 * (full_at - 1)
    assert_same(capture(model, texts, out=tmp_path / "out", **settings), whole)


# -- what it will write -----------------------------------------------------------------------


def test_a_dry_run_states_the_bytes(model: Any, texts: list[str], tmp_path: Path) -> None:
    save_file({"directions": torch.randn(2, 128)}, str(tmp_path / "d.safetensors"))
    project = f"project:{tmp_path / 'd.safetensors'}"
    few = capture(model, texts, at="resid_post[1:3]", out=tmp_path / "out", dry_run=True, apply=project)
    estimate = capture(model, texts, at="resid_post[1:3]", out=tmp_path / "out", dry_run=True)
    assert few.bytes == estimate.bytes * 2 // 128
    assert not (tmp_path / "out").exists()
    capture(model, texts, at="resid_post[1:3]", out=tmp_path / "out")
    written = load_file(str(tmp_path / "out" / "shard-00000.safetensors"))
    assert isinstance(estimate, Estimate)
    assert estimate.bytes == sum(value.nbytes for value in written.values())
    assert (estimate.prompts, estimate.shards) == (len(texts), 1)


# -- refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"at": "resid_pots[1]"}, ArgumentError, "names no place"),
        ({"at": "model.layers.*.mpl.output"}, UnknownModuleError, r"nearest is"),
        ({"at": "model.layers.1.output"}, ArgumentError, r"`model.layers.1.output\[0\]`"),
        ({"at": "attn_pattern[0]"}, ArgumentError, "apply="),
        ({"positions": "lst"}, ArgumentError, "'last'"),
        ({"phase": "decode"}, ArgumentError, "'generated'"),
        ({"dtype": "float12"}, ArgumentError, "dtype of torch"),
        ({"apply": "median"}, ArgumentError, "'mean'"),
        ({"column": "txt"}, ArgumentError, "column="),
        ({"truncate": 1, "positions": "text:mat"}, insitu.PromptError, "`mat` does not occur"),
    ],
)
def test_what_can_t_be_done_says_so(
    model: Any, texts: list[str], tmp_path: Path, settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    rows = [{"text": each} for each in texts]
    with pytest.raises(error, match=text):
        capture(model, rows, **{"at": "resid_post[1]", "out": tmp_path / "out", **settings})


def test_a_prompt_that_is_too_long_is_named(model: Any, texts: list[str], tmp_path: Path) -> None:
    with pytest.raises(insitu.PromptError, match="prompt '3'"):
        capture(model, [*texts[:3], [5] * 5000], at="resid_post[1]", out=tmp_path)


@pytest.mark.parametrize("name", ["missing.txt", "data.xml", "."])
def test_files_that_can_t_be_read(model: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "data.xml").write_text("<a/>")
    with pytest.raises(ArgumentError, match=r"there is no|not a kind of file|no file of a kind"):
        capture(model, tmp_path / name, at="resid_post[1]", out=tmp_path / "out")
