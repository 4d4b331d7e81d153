"""A scripted reflection model: an OpenAI-compatible endpoint that reads the examples and proposes known improvements.

It answers our reflection requests, which are JSON. `propose` gets the current prompt and the rows of the tasks in the
request, and returns the proposal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tests.harness.json_server import IncomingRequest, JsonServer
from tests.harness.tuner import prompt_world

Propose = Callable[[str, Sequence[Mapping[str, Any]]], str]


class ScriptedReflectionModel:
    """Records its requests; answers `down` requests with status 503 first."""

    def __init__(self, propose: Propose = prompt_world.improved) -> None:
        self.propose = propose
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.down = 0
        self.url = ""

    @contextmanager
    def running(self) -> Iterator[ScriptedReflectionModel]:
        """Serve on a free port."""
        server = JsonServer(self._respond)
        self.url = f"{server.url}/v1"
        try:
            yield self
        finally:
            server.close()

    def spec(self, **changes: Any) -> dict[str, Any]:
        """Return the value of `tuner.reflection`."""
        return {
            "base_url": self.url,
            "model": "scripted-reflection",
            "max_attempts": 2,
            "timeout_seconds": 20,
        } | changes

    def answer(self, body: Mapping[str, Any]) -> str:
        """Return the answer to a request."""
        request = json.loads(body["messages"][1]["content"])
        rows = [json.loads(example["task"]) for example in request["examples"]]
        return json.dumps({"diagnosis": "a rule is missing", "prompt": self.propose(request["prompt"], rows)})

    def _respond(self, request: IncomingRequest) -> tuple[int, Any]:
        body = json.loads(request.body)
        self.requests.append(body)
        self.headers.append(request.headers)
        if self.down:
            self.down -= 1
            return 503, {"error": {"message": "overloaded"}}
        message = {"role": "assistant", "content": self.answer(body)}
        usage = {"prompt_tokens": 500, "completion_tokens": 50}
        return 200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}
