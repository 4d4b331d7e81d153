"""A small OpenAI-compatible server that answers from a script and records each request."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Self

from tests.harness.json_server import IncomingRequest, JsonServer

Reply = tuple[int, dict[str, Any]]


def tool_call(name: str, arguments: str) -> dict[str, Any]:
    """An assistant message with one tool call, whose arguments are the JSON text as given."""
    call = {"id": "call-1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def completion(message: dict[str, Any], model: str = "served@v3") -> Reply:
    """A Chat Completions reply of 5 prompt and 2 completion tokens."""
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": model, "choices": [choice], "usage": usage}
    return 200, body


class ScriptedModel:
    """Serves `reply(messages)`; `requests` holds (headers, body) of each request."""

    def __init__(self, reply: Callable[[list[dict[str, Any]]], Reply]) -> None:
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self._reply = reply

    def __enter__(self) -> Self:
        self._server = JsonServer(self._respond)
        self.base_url = f"{self._server.url}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def _respond(self, request: IncomingRequest) -> Reply:
        body = json.loads(request.body)
        self.requests.append((request.headers, body))
        return self._reply(body["messages"])
