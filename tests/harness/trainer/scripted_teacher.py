"""A scripted teacher: a vLLM that scores token ids by a function."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from tests.harness.json_server import IncomingRequest, JsonServer

NAME = "big"
TOKENIZATION = ("/tokenize", "/detokenize")


def tokens_of(path: str, body: dict[str, Any], first: int = 0) -> tuple[int, Any]:
    """Answer as a tokenizer of characters whose ids begin at `first`."""
    if path == "/tokenize":
        return 200, {"tokens": [ord(letter) + first for letter in body["prompt"]]}
    return 200, {"prompt": " ".join(str(token - first) for token in body["tokens"])}


class ScriptedTeacher:
    """An HTTP server on a free port; `logprob(ids)` gives the logprob of the last id after the others."""

    def __init__(self, logprob: Callable[[Sequence[int]], float] = lambda ids: -1.0) -> None:
        self.logprob = logprob
        self.card: dict[str, Any] = {"id": NAME, "max_model_len": 64}
        self.other_cards: list[dict[str, Any]] = []
        self.first = 0  # id of the tokenizer's first character
        self.status = 200
        self.hosted = False  # no prompt_logprobs, as hosted APIs
        self.scored: list[list[int]] = []  # the sequences, in order
        self.requests: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self._server = JsonServer(self._respond)
        self.url = self._server.url

    def close(self) -> None:
        self._server.close()

    def _respond(self, request: IncomingRequest) -> tuple[int, Any]:
        self.authorizations.append(request.headers.get("authorization"))
        if self.status != 200:
            return self.status, {"error": {"message": "no"}}
        if request.path == "/v1/models":
            return 200, {"data": [self.card, *self.other_cards]}
        body = json.loads(request.body)
        if request.path in TOKENIZATION:
            return tokens_of(request.path, body, self.first)
        self.requests.append(body)
        self.scored += body["prompt"]
        return 200, {"choices": [self._choice(index, ids) for index, ids in enumerate(body["prompt"])]}

    def _choice(self, index: int, ids: Sequence[int]) -> dict[str, Any]:
        if self.hosted:
            return {"index": index, "text": "a"}
        scored = [
            {str(ids[end - 1]): {"logprob": self.logprob(ids[:end]), "rank": 1}} for end in range(2, len(ids) + 1)
        ]
        return {"index": index, "prompt_logprobs": [None, *scored]}
