"""Doubles of the models of others: OpenAI-compatible servers with scripted answers, for agents, judges and tuning."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Self

from tests.harness.json_server import IncomingRequest, JsonServer
from tests.harness.proxy.scripts import text_of
from tests.harness.tuner import prompt_world

Reply = tuple[int, Any]
Propose = Callable[[str, Sequence[Mapping[str, Any]]], str]
_SUM = re.compile(r"(\d+) \+ (\d+)")


class ScriptedModel:
    """Serves `reply(body)` on a free port, or the next of `answers`: (status, text or JSON), or a function of the body.

    `requests` holds the bodies, `raw` their bytes, `headers` the headers of every request.
    """

    def __init__(
        self, reply: Callable[[dict[str, Any]], Reply] | None = None, path: str = "/v1/chat/completions"
    ) -> None:
        self.answers: list[Reply | Callable[[dict[str, Any]], Reply]] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.raw: list[bytes] = []
        self.url = ""
        self._reply = reply or self._next_answer
        self._path = path

    def __enter__(self) -> Self:
        self._server = JsonServer(self._respond)
        self.url = self._server.url
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def _respond(self, request: IncomingRequest) -> Reply:
        if request.path != self._path:
            return 404, {"error": {"message": f"no route {request.path}"}}
        body = json.loads(request.body)
        self.requests.append(body)
        self.raw.append(request.body)
        self.headers.append(request.headers)
        return self._reply(body)

    def _next_answer(self, body: dict[str, Any]) -> Reply:
        answer = self.answers.pop(0)
        return answer(body) if callable(answer) else answer


def completion(message: Mapping[str, Any], model: str = "served@v3", tokens: tuple[int, int] = (5, 2)) -> Reply:
    """A Chat Completions reply of so many prompt and completion tokens."""
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": model, "choices": [choice], "usage": usage}
    return 200, body


def says(content: Any) -> Reply:
    """A chat completion with this content, as text or as JSON."""
    text = content if isinstance(content, str) else json.dumps(content)
    return completion({"role": "assistant", "content": text}, tokens=(1000, 100))


def tool_call(name: str, arguments: str) -> dict[str, Any]:
    """An assistant message with one tool call, whose arguments are the JSON text as given."""
    call = {"id": "call-1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


class ScriptedReflectionModel(ScriptedModel):
    """Answers our reflection requests, which are JSON, with a known improvement; `down` requests with 503 first.

    `propose` gets the current prompt and the rows of the tasks in the request, and returns the proposal.
    """

    def __init__(self, propose: Propose = prompt_world.improved) -> None:
        super().__init__(self._propose)
        self.propose = propose
        self.down = 0

    def spec(self, **changes: Any) -> dict[str, Any]:
        """Return the value of `tuner.reflection`."""
        return {
            "base_url": self.base_url, "model": "scripted-reflection", "max_attempts": 2, "timeout_seconds": 20
        } | changes  # fmt: skip

    def answer(self, body: Mapping[str, Any]) -> str:
        """Return the answer to a request."""
        request = json.loads(body["messages"][1]["content"])
        rows = [json.loads(example["task"]) for example in request["examples"]]
        return json.dumps({"diagnosis": "a rule is missing", "prompt": self.propose(request["prompt"], rows)})

    def _propose(self, body: dict[str, Any]) -> Reply:
        if self.down:
            self.down -= 1
            return 503, {"error": {"message": "overloaded"}}
        return completion({"role": "assistant", "content": self.answer(body)}, tokens=(500, 50))


def adding_models() -> ScriptedModel:
    """Models of one server: `right-70` answers 70 of 100 sums right, the same ones at every try; `crash` fails."""

    def reply(body: dict[str, Any]) -> Reply:
        model = body["model"]
        if model == "crash":
            return 500, {"error": {"message": "the GPU fell out", "type": "server_error"}}
        message = {"role": "assistant", "content": answer_of(model, text_of(*body["messages"]))}
        return completion(message, model, tokens=(20, 5))

    return ScriptedModel(reply)


def answer_of(model: str, question: str) -> str:
    """Return the answer of such a model to a question."""
    found = _SUM.search(question)
    assert found is not None, question
    right = int(found[1]) + int(found[2])
    share = int(model.removeprefix("right-"))
    luck = int.from_bytes(blake2b(f"{model} {question}".encode(), digest_size=4).digest()) % 100
    return str(right if luck < share else right + 1)


def entry(url: str, name: str, info: dict[str, float] | None = None) -> dict[str, Any]:
    """Return one model as an entry of model_list."""
    return {
        "model_name": name, "litellm_params": {"model": f"openai/{name}", "api_base": url}, "model_info": info or {}
    }  # fmt: skip
