"""A scripted trainer, learner, grader and vLLM, each in a process of its own so that a campaign can kill it.

The vLLM reads the weights of the scripted learner from the adapter's folder, so the proof of a swap passes only if the
right folder was loaded. The grader derives the score from the trajectory id: judging a trajectory again gives the same
score. Nothing here imports torch.

With RATCHET_ADAPTER_STORE and RATCHET_ADAPTER_CACHE in the environment, learner and vLLM find versions in object
storage, and `gateway` is what they reach it through: it forwards connections, and can be killed in their middle.

    python -m tests.harness.trainer.scripted_processes
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from ratchet.store.store import open_store
from ratchet.trainer.adapters.adapter_store import AdapterStore
from ratchet.trainer.controller.process import run
from ratchet.trainer.errors import CheckpointError
from ratchet.trainer.learner_client import LearnerAccess
from ratchet.trainer.learner_service.operations import CheckpointReferences
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.trainer.scripted_learner import ScriptedLearner, logprob, read_weights, serve_scripted

_PAUSE = 0.01  # seconds


def grade(trajectory_id: str) -> float:
    """Return the grader's score."""
    return int.from_bytes(hashlib.sha256(trajectory_id.encode()).digest()[:4]) / 2**32


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
        url = os.environ.get("RATCHET_ADAPTER_STORE")
        return serve_scripted(int(value), CheckpointReferences(adapters=_adapters() if url else None, url=url))
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
