"""The double of the learner: an agent's weights are the ids of the trajectories it was trained on. Imports no torch.

A trajectory that was trained twice or lost is visible in the newest checkpoint, and a logprob is a function of weights
and ids, so that a vLLM that reads the same checkpoint (`scripted_processes.ScoringVllm`) proves a swap.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from ratchet import __version__
from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.errors import CheckpointDamaged, NoLearningSignal
from ratchet.trainer.learner_api import TOKEN_VARIABLE, AgentHost, LearnerStatus, ModelLimits, RoundReport
from ratchet.trainer.learner_client import AgentLearner, LearnerConnection
from ratchet.trainer.learner_service.operations import CheckpointReferences
from ratchet.trainer.learner_service.process import ServiceAddress, new_status, serve
from ratchet.trainer.learner_service.service import LearnerApp, LearnerService
from ratchet.trainer.local_learner import LocalOperations
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from tests.harness.proxy.servers import eventually, served

WEIGHTS = "weights.json"
TOKEN = "the learner's token"
VOCABULARY = 10**6
_STEP_SECONDS = 0.1  # leaves time for a kill
_PARTS = 4  # files of a checkpoint, written with pauses
_PAUSE = 0.01  # seconds
_ONLY = "agent"  # the agent of a learner that has one


def read_weights(folder: Path | None) -> list[str]:
    """Return the ids of all trajectories a checkpoint was trained on; empty for the base model."""
    return [] if folder is None else [str(name) for name in json.loads((folder / WEIGHTS).read_text())]


def logprob(weights: Sequence[str], ids: Sequence[int]) -> float:
    """Return the logprob of the last id: a deterministic function of weights and ids."""
    digest = hashlib.sha256(json.dumps([list(weights), list(ids)]).encode()).digest()
    return -0.5 - int.from_bytes(digest[:4]) / 2**33


def logprobs(weights: Sequence[str], ids: Sequence[int]) -> tuple[float, ...]:
    """Return the logprobs of a row: that of the last id, and zeros before it."""
    return (*(0.0,) * (len(ids) - 1), logprob(weights, ids))


class ScriptedHost(AgentHost):
    """The host of a learner without a model. `ran` lists the operations in their order.

    A round takes `step_seconds` of real time and `round_seconds` of the host's own clock; `gate` can hold it.
    """

    limits = ModelLimits(vocabulary=VOCABULARY, max_positions=None, caps_logits=False)

    def __init__(self, step_seconds: float = 0.0) -> None:
        self.on_rows: Callable[[int], None] = lambda rows: None
        self.weights: dict[str, list[str]] = {}
        self.ran: list[tuple[str, str]] = []
        self.now = 0.0
        self.step_seconds = step_seconds
        self.round_seconds: dict[str, float] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.in_round = threading.Event()
        self.error: BaseException | None = None  # of the next round, after it has changed the weights
        self.error_after_save: BaseException | None = None

    def clock(self) -> float:
        """Return the time, which only rounds move."""
        return self.now

    def open(self, agent: str, settings: LearnerSettings, resume_from: Path | None) -> int:
        self.ran.append((agent, "open"))
        if resume_from is not None and not checkpoint.complete(resume_from):
            raise CheckpointDamaged(f"{resume_from} is not complete")
        self.weights[agent] = read_weights(resume_from)
        return len(self.weights[agent])

    def train_round(self, agent: str, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport:
        self.ran.append((agent, "train"))
        if not any(row.has_signal for row in rows):
            raise NoLearningSignal("all advantages are 0")
        time.sleep(self.step_seconds)
        self.now += self.round_seconds.get(agent, 0.0)
        self.weights[agent] += dict.fromkeys(row.trajectory_id for row in rows)
        self.on_rows(len(rows))
        self.in_round.set()
        assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        return RoundReport(
            loss=0.1, grad_norm=0.2, entropy=0.3, clip_ratio=0.0, tokens_trained=sum(r.tokens_trained for r in rows),
            rows=len(rows), optimizer_steps=1, step=len(self.weights[agent]), logprob_abs_diff_mean=0.0,
            logprob_abs_diff_max=0.0, tokens_compared=0, importance_clipped_ratio=0.0, seconds=self.step_seconds,
            weight_change=rate_scale,
        )  # fmt: skip

    def score(
        self, agent: str, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | Path = True
    ) -> list[tuple[float, ...]]:
        self.ran.append((agent, "score"))
        weights = (self.weights[agent] if adapter else []) if isinstance(adapter, bool) else read_weights(adapter)
        return [logprobs(weights, row.ids if isinstance(row, TokenRow) else row) for row in rows]

    def save(self, agent: str, folder: Path) -> None:
        self.ran.append((agent, "save"))

        def write(into: Path) -> None:
            (into / checkpoint.STATE).mkdir()
            for part in range(_PARTS):
                (into / checkpoint.STATE / f"part-{part}").write_bytes(b"x" * 4096)
                time.sleep(_PAUSE)
            (into / WEIGHTS).write_text(json.dumps(self.weights[agent]))

        checkpoint.write_atomically(folder, write)
        if self.error_after_save is not None:
            raise self.error_after_save

    def close(self, agent: str) -> None:
        self.ran.append((agent, "close"))
        del self.weights[agent]

    def end(self) -> None:
        """Nothing has to end."""


class ScriptedLearner(AgentLearner):
    """The learner of one agent, with a scripted host of its own. `gates` hold the rounds of the agents they name."""

    def __init__(
        self,
        settings: TrainerSettings | None = None,
        resume_from: str | Path | None = None,
        gates: Mapping[str, threading.Event] = MappingProxyType({}),
    ) -> None:
        self.host = ScriptedHost(_STEP_SECONDS)
        if settings is not None and settings.model in gates:
            self.host.gate = gates[settings.model]
        super().__init__(LocalOperations(self.host), _ONLY, LearnerSettings(), resume_from)
        self._opened()

    def learn(self, names: Sequence[str]) -> None:
        """Add trajectories to the weights."""
        self.host.weights[_ONLY] += names


def scripted_server(
    host: ScriptedHost,
    *roots: Path,
    token: str | None = TOKEN,
    instance: str = "here:1:one",
    clock: Callable[[], float] = time.monotonic,
) -> tuple[LearnerService, LearnerApp]:
    """Return a service of the host that has not started, and its application, which takes bodies of a MiB."""
    status = LearnerStatus(instance, __version__, "base", {"weights": "abc"}, "none", 1, 1)
    service = LearnerService(lambda: host, CheckpointReferences(*roots), status, clock=clock)
    return service, LearnerApp(service, token, 2**20)


@contextmanager
def scripted_service(
    host: ScriptedHost,
    *roots: Path,
    port: int = 0,
    instance: str = "here:1:one",
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[LearnerConnection]:
    """Serve a host over HTTP; the value is a connection to it."""
    service, app = scripted_server(host, *roots, instance=instance, clock=clock)
    with served(app.asgi, port) as url:
        service.start()
        eventually(lambda: service.ready)
        connection = LearnerConnection(url, TOKEN)
        try:
            yield connection
        finally:
            host.gate.set()
            connection.close()
            assert service.stop(20)
    assert service.error is None


def serve_scripted(port: int, references: CheckpointReferences) -> int:
    """Serve a scripted host, with the token of the variable, until SIGTERM."""
    address = ServiceAddress("127.0.0.1", port, os.environ.get(TOKEN_VARIABLE))
    with address.bind() as listener:
        digests = {"weights": os.environ.get("SCRIPTED_WEIGHTS", "abc")}
        status = new_status("base", digests, listener, "none", 1, 1)
        service = LearnerService(lambda: ScriptedHost(_STEP_SECONDS), references, status)
        return serve(service, address, listener)
