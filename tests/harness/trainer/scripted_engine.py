"""A scripted control API of vLLM: it loads, unloads, lists and scores adapters, and can report wrong scores.

It computes nothing: `score` is given by the test. The real vLLM is exercised by the end-to-end run.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ratchet.trainer.rows.token_row import TokenRow
from tests.harness.json_server import IncomingRequest, JsonServer
from tests.harness.trainer.scripted_teacher import TOKENIZATION, tokens_of

Scorer = Callable[[str, Sequence[int]], float]
_TOKENS = range(3, 6)  # the next tokens


class ScorerProtocol(Protocol):
    """Computes logprobs, as the trainer's learner does."""

    def score(
        self, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | str = True
    ) -> list[tuple[float, ...]]: ...


class Faithful:
    """A scorer that computes the logprobs of each name with a learner and the adapter loaded under that name."""

    def __init__(self, engine: ScriptedEngine, learner: Callable[[], ScorerProtocol]) -> None:
        self._engine = engine
        self._learner = learner

    def __call__(self, name: str, ids: Sequence[int]) -> float:
        return self.all_of(name, [ids])[0]

    def all_of(self, name: str, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Score many sequences in one pass, because one pass each would be slow."""
        folder = self._engine.loaded.get(name)
        return [found[-1] for found in self._learner().score(sequences, adapter=folder or False)]


class ScriptedEngine:
    """An HTTP server on a free port; `scorer(name, ids)` gives the logprob of the last id."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.loaded: dict[str, str] = {}
        self.log: list[str] = []
        self.refuse: str | None = None
        self.refusal_status = 400
        self.refuse_chat: set[str] = set()  # names whose chat calls fail
        self.reply: Callable[[str, Sequence[Any]], str] = lambda name, messages: "noted"
        self.requests: list[dict[str, Any]] = []  # bodies of chat calls
        self.key: str | None = None
        self.authorization: str | None = None
        self.load: tuple[int, int] | None = (0, 0)  # calls running and waiting; None: not reported
        self.missing = 0  # loads that find no files yet
        self.answering = threading.Event()  # cleared: every request waits
        self.answering.set()
        self._server = JsonServer(self._respond)
        self.url = self._server.url

    def close(self) -> None:
        self.answering.set()
        self._server.close()

    def _respond(self, request: IncomingRequest) -> tuple[int, Any]:
        self.answering.wait()
        if request.body:
            return self.answer(request.path, json.loads(request.body))
        authorization = f"Bearer {self.key}" if self.key else self.authorization
        if authorization and request.headers.get("authorization") != authorization:
            return 401, {"error": "Unauthorized"}
        if request.path == "/metrics":
            return 200 if self.load else 404, self.metrics()
        return 200, {"data": [{"id": name} for name in ("base", *self.loaded)]}

    def metrics(self) -> str:
        """Return the gauges of its load in vLLM's format."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        label = '{engine="0",model_name="base"}'
        return "".join(
            f"# TYPE {name} gauge\n{name}{label} {n}.0\n" for name, n in zip(names, self.load or (), strict=False)
        )

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/load_lora_adapter":
            if self.missing:
                self.missing -= 1
                return 404, {"error": {"message": f"Loading failed: No adapter found for {body['lora_path']}"}}
            if self.refuse:
                return self.refusal_status, {"error": {"message": self.refuse}}
            self.loaded[body["lora_name"]] = body["lora_path"]
            self.log.append(f"load {body['lora_name']}")
            return 200, {}
        if path == "/v1/unload_lora_adapter":
            self.loaded.pop(body["lora_name"], None)
            self.log.append(f"unload {body['lora_name']}")
            return 200, {}
        if path == "/v1/chat/completions":
            self.requests.append(body)
            if body["model"] in self.refuse_chat:
                return 500, {"error": {"message": "Out of range float values are not JSON compliant"}}
            message = {"role": "assistant", "content": self.reply(body["model"], body["messages"])}
            count = body.get("n", 1)
            text = [{"index": index, "message": message} for index in range(count)]
            return 200, {"choices": text, "usage": {"completion_tokens": 3 * count}}
        if path in TOKENIZATION:
            return tokens_of(path, body)
        choices = [
            {"index": index, "logprobs": {"top_logprobs": [likeliest]}}
            for index, likeliest in enumerate(self._likeliest(body["model"], body["prompt"]))
        ]
        return 200, {"choices": choices}

    def _likeliest(self, name: str, prompts: Sequence[Sequence[int]]) -> list[dict[str, float]]:
        """Return the likeliest next tokens: always the same few ids, however many are requested."""
        messages = [(*ids, token) for ids in prompts for token in _TOKENS]
        scorer = self.scorer
        found = iter(
            scorer.all_of(name, messages) if isinstance(scorer, Faithful) else [scorer(name, i) for i in messages]
        )
        return [{f"token_id:{token}": next(found) for token in _TOKENS} for _ in prompts]
