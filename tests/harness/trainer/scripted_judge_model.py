"""A scripted judge model: an OpenAI-compatible chat endpoint with scripted answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.harness.json_server import IncomingRequest, JsonServer

Answer = tuple[int, Any]


class ScriptedJudgeModel:
    """Answers each request with the next of `answers`: (status, text or JSON); records them."""

    def __init__(self, path: str = "/v1/chat/completions") -> None:
        self.path = path
        self.answers: list[Answer | Callable[[dict[str, Any]], Answer]] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.raw: list[bytes] = []
        self.url = ""

    @contextmanager
    def running(self) -> Iterator[ScriptedJudgeModel]:
        """Serve on a free port."""
        server = JsonServer(self._respond)
        self.url = server.url
        try:
            yield self
        finally:
            server.close()

    def _respond(self, request: IncomingRequest) -> Answer:
        if request.path != self.path:
            return 404, {"error": {"message": f"no route {request.path}"}}
        body = json.loads(request.body)
        self.requests.append(body)
        self.raw.append(request.body)
        self.headers.append(request.headers)
        answer = self.answers.pop(0)
        return answer(body) if callable(answer) else answer


def says(content: Any) -> Answer:
    """A chat completion with this content."""
    text = content if isinstance(content, str) else json.dumps(content)
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 1000, "completion_tokens": 100}
    return 200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}
