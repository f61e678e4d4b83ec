"""The way into vLLM's workers: methods that vLLM adds to its worker class (``worker_extension_cls``)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import vllm
from vllm.tokenizers import cached_tokenizer_from_config

from insitu.block import EngineError, InsituError
from insitu.engine.channel import answered, decode
from insitu.engine.job import Job
from insitu.engine.lora import Fit, Loras
from insitu.engine.signals import interrupt_blocks_only
from insitu.engine.standin import WorkerSide
from insitu.engine.taps import install as taps
from insitu.engine.worker.cpu_experts import let_experts_be_float32
from insitu.engine.worker.following import FollowingHost
from insitu.engine.worker.host import Host
from insitu.engine.worker.runner_v1 import V1Adapter
from insitu.engine.worker.runner_v2 import V2Adapter
from insitu.engine.worker.stages import take_turns
from insitu.engine.worker.stats import Stats
from insitu.run import Names, Outcome, names_of, visits
from insitu.run.spent import seconds_in_blocks
from insitu.run.stage_leader import StageLeader
from insitu.run.tapped import TappedInterleaver
from insitu.run.tapped_ranks import TappedLeader
from insitu.tree import Listing, Named, Outline, Place
from insitu.wire import Port, Shared

# vLLM imports this file before it makes a worker.
taps.install_when_loaded()
let_experts_be_float32()


class InsituWorker:
    """Called from the client by ``collective_rpc``. Names are prefixed, since they live in vLLM's class."""

    insitu_host: Host | FollowingHost | None = None
    insitu_loras: Loras | None = None
    insitu_port: Port | None = None
    insitu_refusal: InsituError | None = None
    insitu_shared: dict[int, Shared]

    def insitu_attach(self) -> None:
        """Puts insitu beside the model runner.

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
        take_turns(self, adapter)

    def insitu_open(self) -> None:
        """Attached, makes this worker answer by messages. If it can't be attached, each of them is answered so."""
        self.insitu_shared = {}
        try:
            self.insitu_attach()
        except InsituError as error:
            self.insitu_refusal = error
            self.insitu_port = Port(lambda obj: None, lambda name: None)
            return
        interrupt_blocks_only()
        if isinstance(self.insitu_host, FollowingHost):
            return
        self._insitu.interleaver.sender.keeps_whole = True
        config = self.model_runner.model_config  # type: ignore[attr-defined]
        side = WorkerSide(config.model, self._insitu.interleaver, lambda: cached_tokenizer_from_config(config))
        self.insitu_port = Port(side.name, side.find)

    def insitu_call(self, call: bytes) -> bytes | None:
        """A call of one of these methods by a message; the answer is one, too. Of several ranks, the first
        one answers."""
        request = decode(call)
        host = self.insitu_host
        if isinstance(host, FollowingHost):
            host.called(request.method, request.jobs)
            return None
        assert self.insitu_port is not None
        if self.insitu_refusal is not None:
            return self.insitu_port.pack((None, self.insitu_refusal))
        interleaver = self._insitu.interleaver
        with interleaver.window() if request.method in interleaver.windowed else nullcontext():
            return answered(self.insitu_port, getattr(self, request.method), request.message)

    def insitu_outline(self) -> tuple[Outline, int]:
        """The model's outline and its number of layers."""
        interleaver = self._insitu.interleaver
        return interleaver.modules.outline(), interleaver.anatomy.layers

    def insitu_submit(self, jobs: list[Job], shared: list[Any] | None = None, shipment: int = 0) -> None:
        if shared:
            self.insitu_shared[shipment] = Shared(shared)
        self._insitu.submit(jobs)

    def insitu_install(self, number: int, edit: Job) -> None:
        self._insitu.install(number, edit)

    def insitu_uninstall(self, numbers: list[int]) -> None:
        self._insitu.uninstall(numbers)

    def insitu_collect(self, results: dict[str, Any]) -> dict[str, list[Outcome]]:
        """What blocks left beside requests that have ended: outputs by job, or by group for installed edits."""
        return self._insitu.collect(results)

    def insitu_changes(self, shipment: int) -> dict[int, Any]:
        """What blocks have changed of the objects that came with them."""
        assert self.insitu_port is not None, "the objects came by a message"
        return self.insitu_shared.pop(shipment).changes(self.insitu_port.hindrance)

    def insitu_drop(self, keys: list[str], shipment: int = 0) -> None:
        self._insitu.drop(keys)
        if shipment:
            self.insitu_shared.pop(shipment, None)

    def insitu_in_flight(self) -> int:
        return self._insitu.in_flight()

    def insitu_fit(self, adapter: Any) -> Fit | None:
        """How a LoRA adapter fits the model; None if the engine was built without adapters."""
        if self.insitu_loras is None:
            return None
        stage = self._insitu.interleaver
        elsewhere = stage.adaptable_elsewhere() if isinstance(stage, StageLeader) else ()
        return self.insitu_loras.fit(adapter, elsewhere)

    def insitu_stats(self) -> Stats:
        host, runner = self._insitu, self.model_runner  # type: ignore[attr-defined]
        steps = host.eager_steps, host.plain_steps, host.tapped_steps
        at_taps = host.interleaver.counts if isinstance(host.interleaver, TappedInterleaver) else ()
        return Stats(*steps, taps.nbytes(runner), *host.counts, seconds_in_blocks(), *at_taps)

    def insitu_taps(self) -> dict[Place, bool]:
        interleaver = self._insitu.interleaver
        faults = interleaver.faults() if isinstance(interleaver, TappedInterleaver) else ()
        if isinstance(interleaver, TappedLeader):
            for refusal in interleaver.wholes.others.values():
                raise refusal
        return taps.passed(self.model_runner, faults)  # type: ignore[attr-defined]

    def insitu_use_taps(self, use: bool) -> None:
        self._insitu.interleaver.in_use = use

    def insitu_operations(self, path: str, op: str) -> Listing:
        return self._insitu.interleaver.operations(path, op)

    def insitu_names(self) -> Names:
        return names_of(self._insitu.interleaver)

    def insitu_visits(self, places: list[Named]) -> list[int]:
        return visits(self._insitu.interleaver, places)

    @property
    def _insitu(self) -> Host:
        if not isinstance(self.insitu_host, Host):
            raise EngineError("insitu is not attached to this worker")
        return self.insitu_host
