"""The main job, run on a small real model: ``make demo``, or ``python -m insitu.walkthrough``."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

EIFFEL = "The Eiffel Tower is in the city of"
PROMPTS = [EIFFEL, "The capital of Japan is the city of", "Water boils at"]
STEPS = 7


class Walkthrough:
    """Six things to do with a model, each printed as it is done."""

    def __init__(self, out: Path, url: str | None = None) -> None:
        self.out = out
        self.url = url
        self.console: Console = Console(highlight=False)
        self.progress: Progress = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.completed}/{task.total}  {task.description}"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        )
        self.task: TaskID = self.progress.add_task("", total=STEPS)

    def run(self) -> None:
        start = time.monotonic()
        with self.progress:
            self.model: Any = self.started()
            self.say_what_it_is()
            for title, part in [
                ("Reading values inside the model", self.read),
                ("Editing: zeroing MLPs until the answer changes", self.write),
                ("Three prompts in one trace", self.several),
                ("A logit lens over all layers", self.lens),
            ]:
                with self.step(title):
                    part()
            with self.step("Closing the engine"):
                self.left: int = self.model.in_flight()
                self.model.close()
        seconds = time.monotonic() - start
        self.console.print(f"\nDone in {seconds:.1f} s; {self.left} requests left in the engine.")

    def started(self) -> Any:
        import insitu

        if self.url is not None:
            with self.step(f"Connecting to {self.url}"):
                return insitu.connect(self.url)
        with self.step("Building the folder of SmolLM2-135M-Instruct (once)"):
            folder = insitu.demo_model()
        with self.step("Starting vLLM's CPU engine in this process"):
            return insitu.VLLM(folder, dtype="float32", enforce_eager=True, max_model_len=512).dispatch()

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        self.progress.update(self.task, description=title)
        self.console.print(f"\n[bold]{title}[/bold]")
        yield
        self.progress.advance(self.task)

    def say_what_it_is(self) -> None:
        if self.url is not None:
            about = self.model.about
            self.console.print(
                f"{about['architecture']}, {len(self.model.resid_post)} layers of width {about['width']}, "
                f"{about['vocabulary']} tokens, {about['dtype']}"
            )
            return
        config = self.model.vllm_entrypoint.llm_engine.vllm_config.model_config
        self.console.print(
            f"{config.architectures[0]}, {len(self.model.resid_post)} layers of width {config.get_hidden_size()}, "
            f"{config.get_vocab_size()} tokens, {str(config.dtype).removeprefix('torch.')}"
        )

    def read(self) -> None:
        model = self.model
        middle = len(model.resid_post) // 2
        with model.trace(EIFFEL, temperature=0.0, max_tokens=1) as tracer:
            mlp = model.model.layers[middle].mlp.output.save()
            logits = model.logits.save()
            result = tracer.result.save()
        self.console.print(f"prompt         {EIFFEL!r}, {len(result.prompt_token_ids)} tokens")
        self.console.print(f"mlp.output     {tuple(mlp.shape)}, of layer {middle}")
        self.console.print(f"model.logits   {tuple(logits.shape)}")
        self.console.print(f"tracer.result  the next token is {result.outputs[0].text!r}")
        self.before = logits

    def write(self) -> None:
        model = self.model
        layers = len(model.resid_post)
        first, width, after, answer = 0, 0, self.before, " Paris"
        while answer == " Paris" and width < layers:
            width += 2
            first = (layers - width) // 2
            with model.trace(EIFFEL, temperature=0.0, max_tokens=1) as tracer:
                for layer in model.model.layers[first : first + width]:
                    layer.mlp.output[:] = 0
                after = model.logits.save()
                result = tracer.result.save()
            answer = result.outputs[0].text
        self.console.print(
            f"zeroing the MLPs of the {width} middle layers ({first} to {first + width - 1}): "
            f"{' Paris'!r} becomes {answer!r}"
        )
        table = Table("before", "probability", "after", "probability", box=None)
        for (a, p), (b, q) in zip(self.top(self.before), self.top(after), strict=True):
            table.add_row(repr(a), f"{p:.3f}", repr(b), f"{q:.3f}")
        self.console.print(table)

    def several(self) -> None:
        model = self.model
        hidden, answer = [], []
        with model.trace(temperature=0.0, max_tokens=4) as tracer:
            for prompt in PROMPTS:
                with tracer.invoke(prompt):
                    hidden = model.resid_post[6].save()
                    answer = tracer.result.save()
        table = Table("prompt", "hidden, after layer 6", "answer", box=None)
        for prompt, rows, result in zip(PROMPTS, hidden, answer, strict=True):
            table.add_row(repr(prompt), str(tuple(rows.shape)), repr(result.outputs[0].text))
        self.console.print(table)

    def lens(self) -> None:
        from insitu.recipes import logit_lens

        lens = logit_lens(self.model, EIFFEL)
        self.out.mkdir(parents=True, exist_ok=True)
        for name, save in (("logit_lens.png", lens.save_png), ("logit_lens.html", lens.save_html)):
            path = self.out / name
            save(path)
            self.console.print(f"written: {path}", soft_wrap=True)
        last = [row[-1][0][0] for row in lens.top]
        self.console.print(f"at the last position {' Paris'!r} is on top from layer {_settled(last)} on")

    def top(self, logits: Any) -> list[tuple[str, float]]:
        probs, ids = logits[0].softmax(-1).topk(5)
        return [(self.model.tokenizer.decode([i]), p) for i, p in zip(ids.tolist(), probs.tolist(), strict=True)]


def _settled(tokens: list[str]) -> int:
    """The layer from which on the last layer's token is on top."""
    layer = len(tokens) - 1
    while layer > 0 and tokens[layer - 1] == tokens[-1]:
        layer -= 1
    return layer


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m insitu.walkthrough", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs"), help="folder for the pictures")
    parser.add_argument("--url", help="of a server that `insitu serve` runs, instead of an engine here")
    given = parser.parse_args(argv)
    out: Path = given.out
    # vLLM logs its whole configuration; here it would drown what the demo shows.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    Walkthrough(out.resolve(), given.url).run()


if __name__ == "__main__":
    main()
