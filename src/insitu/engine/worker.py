"""The way into vLLM's workers: methods that vLLM adds to its worker class (``worker_extension_cls``)."""

from __future__ import annotations

from typing import Any

import vllm

from insitu.block import EngineError
from insitu.engine import taps
from insitu.engine.host import Host, Stats
from insitu.engine.job import Job
from insitu.engine.lora import Fit, Loras
from insitu.engine.runner_v1 import V1Adapter
from insitu.engine.runner_v2 import V2Adapter
from insitu.run import Names, Outcome, names_of
from insitu.tree import Listing, Outline, Place

# vLLM imports this file before it makes a worker.
taps.install_when_loaded()


class InsituWorker:
    """Called from the client by ``collective_rpc``. Names are prefixed, since they live in vLLM's class."""

    insitu_host: Host | None = None
    insitu_loras: Loras | None = None

    def insitu_attach(self) -> tuple[Outline, int]:
        """Puts insitu beside the model runner; returns the model's outline and its number of layers.

        Called once compilation and graph capture are over, so that neither ever meets insitu.
        """
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        fitting = [kind for kind in (V2Adapter, V1Adapter) if kind.fits(runner)]
        if not fitting:
            raise EngineError(
                f"insitu does not know the model runner {type(runner).__module__}.{type(runner).__name__} of vLLM "
                f"{vllm.__version__}; docs/compatibility.md lists what it knows"
            )
        adapter = fitting[0](runner)
        self.insitu_host = adapter.host
        self.insitu_loras = adapter.loras
        return adapter.interleaver.modules.outline(), adapter.interleaver.anatomy.layers

    def insitu_submit(self, jobs: list[Job]) -> None:
        self._insitu.submit(jobs)

    def insitu_collect(self, results: dict[str, Any]) -> dict[str, list[Outcome]]:
        return self._insitu.collect(results)

    def insitu_drop(self, jobs: list[str]) -> None:
        self._insitu.drop(jobs)

    def insitu_in_flight(self) -> int:
        return self._insitu.in_flight()

    def insitu_fit(self, adapter: Any) -> Fit | None:
        """How a LoRA adapter fits the model; None if the engine was built without adapters."""
        return self.insitu_loras.fit(adapter) if self.insitu_loras else None

    def insitu_stats(self) -> Stats:
        host, runner = self._insitu, self.model_runner  # type: ignore[attr-defined]
        return Stats(host.eager_steps, host.plain_steps, host.tapped_steps, taps.nbytes(runner))

    def insitu_taps(self) -> dict[Place, bool]:
        return taps.passed(self.model_runner)  # type: ignore[attr-defined]

    def insitu_use_taps(self, use: bool) -> None:
        self._insitu.interleaver.in_use = use

    def insitu_operations(self, path: str, op: str) -> Listing:
        return self._insitu.interleaver.operations(path, op)

    def insitu_names(self) -> Names:
        return names_of(self._insitu.interleaver)

    @property
    def _insitu(self) -> Host:
        if self.insitu_host is None:
            raise EngineError("insitu is not attached to this worker")
        return self.insitu_host
