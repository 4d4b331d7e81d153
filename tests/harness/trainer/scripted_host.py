"""A scripted host of a learner: an agent's weights are the ids of its trajectories. Imports no torch.

Rounds take as long as the test says: `round_seconds` of its own clock pass, and `gate` can hold them.

    python -m tests.harness.trainer.scripted_host PORT      a learner process, with the token of the variable
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ratchet import __version__
from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.errors import CheckpointDamaged, NoLearningSignal
from ratchet.trainer.learner_api import TOKEN_VARIABLE, AgentHost, LearnerStatus, ModelLimits, RoundReport
from ratchet.trainer.learner_client import LearnerConnection
from ratchet.trainer.learner_service.operations import LocalReferences
from ratchet.trainer.learner_service.process import LearnerServer, ServiceAddress, new_status, serve
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.proxy.servers import eventually, served

WEIGHTS = "weights.json"
TOKEN = "the learner's token"


class ScriptedHost(AgentHost):
    """The host of a learner without a model. `ran` lists the operations in their order."""

    limits = ModelLimits(vocabulary=512, max_positions=1024, caps_logits=False)

    def __init__(self) -> None:
        self.weights: dict[str, list[str]] = {}
        self.ran: list[tuple[str, str]] = []
        self.now = 0.0
        self.round_seconds: dict[str, float] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.in_round = threading.Event()
        self.error: BaseException | None = None  # of the next round, after it has changed the weights

    def clock(self) -> float:
        """Return the time, which only rounds move."""
        return self.now

    def open(self, agent: str, settings: LearnerSettings, resume_from: Path | None) -> int:
        self.ran.append((agent, "open"))
        if resume_from is not None and not checkpoint.complete(resume_from):
            raise CheckpointDamaged(f"{resume_from} is not complete")
        self.weights[agent] = [] if resume_from is None else json.loads((resume_from / WEIGHTS).read_text())
        return len(self.weights[agent])

    def train_round(
        self,
        agent: str,
        rows: Sequence[TokenRow],
        rate_scale: float = 1.0,
        on_rows: Callable[[int], None] | None = None,
    ) -> RoundReport:
        self.ran.append((agent, "train"))
        if not any(row.has_signal for row in rows):
            raise NoLearningSignal("all advantages are 0")
        self.now += self.round_seconds.get(agent, 0.0)
        self.weights[agent] += [row.trajectory_id for row in rows]
        if on_rows is not None:
            on_rows(len(rows))
        self.in_round.set()
        assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        return RoundReport(
            loss=0.1, grad_norm=0.2, entropy=0.3, clip_ratio=0.0, tokens_trained=sum(r.tokens_trained for r in rows),
            rows=len(rows), optimizer_steps=1, step=len(self.weights[agent]), logprob_abs_diff_mean=0.0,
            logprob_abs_diff_max=0.0, tokens_compared=0, importance_clipped_ratio=0.0, seconds=0.0,
            weight_change=rate_scale,
        )  # fmt: skip

    def score(
        self, agent: str, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | Path = True
    ) -> list[tuple[float, ...]]:
        self.ran.append((agent, "score"))
        count = len(self.weights[agent]) if adapter is True else 0
        ids = [row.ids if isinstance(row, TokenRow) else row for row in rows]
        return [tuple(-float(count) - 0.1 * token for token in row) for row in ids]

    def save(self, agent: str, folder: Path) -> None:
        self.ran.append((agent, "save"))

        def write(into: Path) -> None:
            (into / WEIGHTS).write_text(json.dumps(self.weights[agent]))

        checkpoint.write_atomically(folder, write)

    def close(self, agent: str) -> None:
        self.ran.append((agent, "close"))
        del self.weights[agent]


def scripted_status(**changes: Any) -> LearnerStatus:
    """The status of a learner of the scripted host."""
    values: dict[str, Any] = {
        "instance": "here:1:one", "version": __version__, "base_model": "base",
        "base_model_digests": {"weights": "abc"}, "ready": False, "sharding": "none", "processes": 1, "machines": 1,
        "limits": None, "running": None, "agents": (),
    }  # fmt: skip
    return LearnerStatus(**(values | changes))


def scripted_server(
    host: ScriptedHost, *roots: Path, token: str | None = TOKEN, max_body_mb: int = 1, instance: str = "here:1:one"
) -> LearnerServer:
    """Return a server of the host that has not started."""
    address = ServiceAddress("127.0.0.1", 0, token, max_body_mb)
    return LearnerServer(lambda: host, LocalReferences(*roots), address, scripted_status(instance=instance))


@contextmanager
def scripted_service(
    host: ScriptedHost, *roots: Path, port: int = 0, instance: str = "here:1:one"
) -> Iterator[LearnerConnection]:
    """Serve a host over HTTP; the value is a connection to it."""
    server = scripted_server(host, *roots, instance=instance)
    with served(server.app, port) as url:
        server.thread.start()
        eventually(lambda: server.thread.ready)
        connection = LearnerConnection(url, TOKEN)
        try:
            yield connection
        finally:
            host.gate.set()
            connection.close()
            assert server.thread.stop(20)
    server.raise_error()


def main(port: int) -> int:
    """Serve a scripted host until SIGTERM."""
    logging.basicConfig(level=logging.INFO)
    address = ServiceAddress("127.0.0.1", port, os.environ.get(TOKEN_VARIABLE))
    with address.bind() as listener:
        digests = {"weights": os.environ.get("SCRIPTED_WEIGHTS", "abc")}
        status = new_status("base", digests, listener, "none", 1, 1)
        return serve(LearnerServer(ScriptedHost, LocalReferences(), address, status), listener)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
