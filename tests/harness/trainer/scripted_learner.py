"""A scripted trainer, grader and vLLM, each in a process of its own so that a campaign can kill it.

The learner's weights are the ordered list of the trajectories it was trained on: a trajectory that was trained twice or
lost is visible in the newest checkpoint. The vLLM reads that list from the adapter's folder, so the proof of a swap
passes only if the right folder was loaded. The grader derives the score from the trajectory id: judging a trajectory
again gives the same score. Nothing here imports torch.

With RATCHET_ADAPTER_STORE and RATCHET_ADAPTER_CACHE in the environment, learner and vLLM find versions in object
storage, and `gateway` is what they reach it through: it forwards connections, and can be killed in their middle.

    python -m tests.harness.trainer.scripted_learner
        trainer SETTINGS_OF_AGENTS_JSON | learner PORT | grader PORT | vllm PORT | gateway PORT:TARGET_PORT
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import hashlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from ratchet.store.store import open_store
from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.adapters.adapter_store import AdapterStore
from ratchet.trainer.controller_service.controller_process import run
from ratchet.trainer.errors import CheckpointError
from ratchet.trainer.learner_api import AgentHost, ModelLimits, RoundReport
from ratchet.trainer.learner_client import LearnerAccess
from ratchet.trainer.learner_service.operations import (
    CheckpointReferences,
    LocalReferences,
    OnRows,
    StoredReferences,
)
from ratchet.trainer.learner_service.process import LearnerServer, ServiceAddress, new_status, serve
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from tests.harness.proxy.scripted_vllm import ScriptedVllm

WEIGHTS = "weights.json"
_STEP_SECONDS = 0.1  # leaves time for a kill
_PARTS = 4  # files of a checkpoint, written with pauses
_PAUSE = 0.01  # seconds


def read_weights(folder: Path | None) -> list[str]:
    """Return the ids of all trajectories a checkpoint was trained on; empty for the base model."""
    return [] if folder is None else [str(name) for name in json.loads((folder / WEIGHTS).read_text())]


def logprob(weights: Sequence[str], ids: Sequence[int]) -> float:
    """Return the logprob of the last id: a deterministic function of weights and ids."""
    digest = hashlib.sha256(json.dumps([list(weights), list(ids)]).encode()).digest()
    return -0.5 - int.from_bytes(digest[:4]) / 2**33


def grade(trajectory_id: str) -> float:
    """Return the grader's score."""
    return int.from_bytes(hashlib.sha256(trajectory_id.encode()).digest()[:4]) / 2**32


class ScriptedLearner:
    """A learner whose weights are the ids of its trajectories."""

    def __init__(self, _: TrainerSettings | None, resume_from: str | Path | None) -> None:
        self._weights = read_weights(None if resume_from is None else Path(resume_from))

    @property
    def step(self) -> int:
        return len(self._weights)

    def unfit(self, row: TokenRow) -> str | None:
        return None

    def train_round(self, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport:
        time.sleep(_STEP_SECONDS)
        names = list(dict.fromkeys(row.trajectory_id for row in rows))
        self.learn(names)
        tokens = sum(row.tokens_trained for row in rows)
        return RoundReport(
            loss=0.0, grad_norm=0.0, entropy=0.0, clip_ratio=0.0, tokens_trained=tokens,
            rows=len(rows), optimizer_steps=1, step=self.step, logprob_abs_diff_mean=0.0, logprob_abs_diff_max=0.0,
            tokens_compared=0, importance_clipped_ratio=0.0, seconds=_STEP_SECONDS, weight_change=float(len(names)),
        )  # fmt: skip

    def learn(self, names: Sequence[str]) -> None:
        """Add trajectories to the weights."""
        self._weights = [*self._weights, *names]

    def score(
        self, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | str | Path = True
    ) -> list[tuple[float, ...]]:
        sequences = [row.ids if isinstance(row, TokenRow) else row for row in rows]
        weights = (self._weights if adapter else []) if isinstance(adapter, bool) else read_weights(Path(adapter))
        return [(*(0.0,) * (len(ids) - 1), logprob(weights, ids)) for ids in sequences]

    def save(self, folder: str | Path) -> None:
        checkpoint.write_atomically(Path(folder), self._write)

    def load(self, folder: str | Path | None, _: LearnerSettings) -> None:
        self._weights = read_weights(None if folder is None else Path(folder))

    def _write(self, folder: Path) -> None:
        (folder / checkpoint.STATE).mkdir()
        for part in range(_PARTS):
            (folder / checkpoint.STATE / f"part-{part}").write_bytes(b"x" * 4096)
            time.sleep(_PAUSE)
        (folder / WEIGHTS).write_text(json.dumps(self._weights))


class ScriptedAgents(AgentHost):
    """The host of a learner service: a scripted learner per agent."""

    limits = ModelLimits(vocabulary=10**6, max_positions=None, caps_logits=False)

    def __init__(self) -> None:
        self._learners: dict[str, ScriptedLearner] = {}

    def open(self, agent: str, settings: LearnerSettings, resume_from: Path | None) -> int:
        learner = self._learners[agent] = ScriptedLearner(None, resume_from)
        return learner.step

    def train_round(
        self, agent: str, rows: Sequence[TokenRow], rate_scale: float = 1.0, on_rows: OnRows | None = None
    ) -> RoundReport:
        return self._learners[agent].train_round(rows, rate_scale)

    def score(
        self, agent: str, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | Path = True
    ) -> list[tuple[float, ...]]:
        return self._learners[agent].score(rows, adapter=adapter)

    def save(self, agent: str, folder: Path) -> None:
        self._learners[agent].save(folder)

    def close(self, agent: str) -> None:
        del self._learners[agent]


class ScoringVllm(ScriptedVllm):
    """The scripted vLLM, which also unloads adapters, reports its load, and scores ids with a loaded adapter.

    It finds an adapter that it does not know in the adapter store of its environment, as the plug-in for vLLM does.
    """

    running = 0  # chat calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "RATCHET_ADAPTER_STORE" in os.environ and scope.get("path") in ("/v1/chat/completions", "/v1/completions"):
            body = await _body(receive)
            await asyncio.to_thread(self._resolve, str(body["model"]))
            receive = _replaying(body, receive)
        if scope["type"] == "http" and scope["path"] == "/metrics":
            gauges = f"vllm:num_requests_running {self.running}\nvllm:num_requests_waiting 0\n"
            await _send(send, 200, b"text/plain", gauges.encode())
        elif scope["type"] == "http" and scope["path"] == "/v1/chat/completions":
            self.running += 1
            try:
                await super().__call__(scope, receive, send)
            finally:
                self.running -= 1
        elif scope["type"] == "http" and scope["path"] == "/v1/unload_lora_adapter":
            self.adapters.pop(str((await _body(receive))["lora_name"]), None)
            await _answer(send, 200, "Success: LoRA adapter removed successfully.")
        elif scope["type"] == "http" and scope["path"] == "/v1/completions":
            await self._score(await _body(receive), send)
        else:
            await super().__call__(scope, receive, send)

    def _resolve(self, name: str) -> None:
        alias, _, version = name.rpartition("@")
        if alias and version.isdigit() and int(version) and name not in self.adapters:
            url = f"{os.environ['RATCHET_ADAPTER_STORE']}/{alias}/checkpoints/{int(version):04d}"
            with contextlib.suppress(CheckpointError):
                self.adapters[name] = str(_adapters().fetch(url, state=False))

    async def _score(self, body: dict[str, Any], send: Send) -> None:
        name = body["model"]
        if name not in (self.base, *self.adapters):
            await _answer(send, 404, {"error": {"message": f"The model `{name}` does not exist."}})
            return
        if "logprobs" not in body:
            await _answer(send, 200, {"choices": [{"index": 0, "text": ""}]})
            return
        weights = read_weights(Path(self.adapters[name]) if name in self.adapters else None)
        tops = [
            {f"token_id:{token}": logprob(weights, (*ids, token)) for token in range(3, 3 + body["logprobs"])}
            for ids in body["prompt"]
        ]
        choices = [{"index": place, "logprobs": {"top_logprobs": [top]}} for place, top in enumerate(tops)]
        await _answer(send, 200, {"choices": choices})


async def grader(scope: Scope, receive: Receive, send: Send) -> None:
    """The ASGI application of the judge's server."""
    if scope["type"] == "http":
        name = str((await _body(receive))["trajectory_id"])
        await asyncio.sleep(_PAUSE)
        await _answer(send, 200, {"score": grade(name)})


def _adapters() -> AdapterStore:
    return AdapterStore(Path(os.environ["RATCHET_ADAPTER_CACHE"]))


def _replaying(body: dict[str, Any], receive: Receive) -> Receive:
    """Return a `receive` that gives a body that was read before, and then what comes after it."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


async def forward(port: int, target: int) -> None:
    """Forward every connection to another port of this machine."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(copy(reader, back), copy(there, writer))

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    await server.serve_forever()


async def _body(receive: Receive) -> dict[str, Any]:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), bool(message.get("more_body"))
    found: dict[str, Any] = json.loads(body)
    return found


async def _answer(send: Send, status: int, value: Any) -> None:
    await _send(send, status, b"application/json", json.dumps(value).encode())


async def _send(send: Send, status: int, kind: bytes, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
    await send({"type": "http.response.body", "body": body})


def train(agents: Sequence[TrainerSettings]) -> int:
    """Run the controller, with a learner in its process, or with the one at `learner.url`."""
    by_name = {settings.model: settings for settings in agents}
    if agents[0].learner_process.url is None:
        return run(by_name, ScriptedLearner)
    store = open_store(agents[0].store)
    with LearnerAccess(agents[0], store) as learner:
        return run(by_name, learner.learner_of, None, lambda process: learner.call_on_failure(process.stop))


def main() -> int:
    """Run one process until it is killed."""
    import uvicorn

    role, value = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    faulthandler.register(signal.SIGUSR1)  # prints its stack
    if role == "trainer":
        return train([TrainerSettings(**values) for values in json.loads(value)])
    if role == "learner":
        address = ServiceAddress("127.0.0.1", int(value), None)
        with address.bind() as listener:
            status = new_status("scripted", {}, listener, "none", 1, 1)
            references: CheckpointReferences = LocalReferences()
            if url := os.environ.get("RATCHET_ADAPTER_STORE"):
                references = StoredReferences(LocalReferences(), _adapters(), url)
            return serve(LearnerServer(ScriptedAgents, references, address, status), listener)
    if role == "gateway":
        port, target = map(int, value.split(":"))
        asyncio.run(forward(port, target))
    app: Any = grader if role == "grader" else ScoringVllm()
    uvicorn.run(
        app, port=int(value), http="httptools", loop="uvloop", log_level="critical", lifespan="off",
        timeout_keep_alive=75,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
