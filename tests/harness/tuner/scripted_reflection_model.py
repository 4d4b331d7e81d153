"""A scripted reflection model: an OpenAI-compatible endpoint that reads the examples and proposes known improvements.

It answers our reflection requests (JSON) and those of DSPy's MIPRO in their own format. `propose` gets the current
prompt and the rows of the tasks in the request, and returns the proposal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tests.harness.json_server import IncomingRequest, JsonServer
from tests.harness.tuner import prompt_world

Propose = Callable[[str, Sequence[Mapping[str, Any]]], str]
_ROW = re.compile(r'\{"question".*?\}')


class ScriptedReflectionModel:
    """Records its requests; answers `down` requests with status 503 first."""

    def __init__(self, propose: Propose = prompt_world.improved) -> None:
        self.propose = propose
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.down = 0
        self.url = ""
        self._proposals = 0

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
        words = "\n".join(str(message["content"]) for message in body["messages"])
        if "[[ ##" in words:
            return self._in_dspy_form(words)
        request = json.loads(body["messages"][1]["content"])
        rows = [json.loads(example["task"]) for example in request["examples"]]
        return json.dumps({"diagnosis": "a rule is missing", "prompt": self.propose(request["prompt"], rows)})

    def _in_dspy_form(self, words: str) -> str:
        field = words.rpartition("starting with the field `[[ ## ")[2].partition(" ## ]]")[0]
        text = "They ask for words."
        if field == "observations":
            rows = [json.loads(found) for found in _ROW.findall(words)]
            text = "Each asks for the word of a thing: " + "; ".join(sorted({json.dumps(row) for row in rows}))
        elif field == "summary":
            text = words.rpartition("[[ ## observations ## ]]")[2].partition("Respond with")[0].strip()
        elif field == "proposed_instruction":
            text = self._proposed(words)
        return f"[[ ## {field} ## ]]\n{text}\n\n[[ ## completed ## ]]"

    def _proposed(self, words: str) -> str:
        """Return the n-th proposal, which contains n more rules; after the last it starts over."""
        rows = [json.loads(found) for found in _ROW.findall(words)]
        prompt = words.rpartition("[[ ## basic_instruction ## ]]")[2].partition("[[ ##")[0].strip()
        for _ in range(self._proposals % 4):
            prompt = self.propose(prompt, rows)
        self._proposals += 1
        return prompt

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
