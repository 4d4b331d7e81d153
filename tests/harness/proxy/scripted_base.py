"""A scripted vLLM's answers to the fixed questions that identify a base model (store/policies/fingerprints.py)."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from ratchet.store.policies.fingerprints import requests

_QUESTIONS = {part: body for part, (_, body) in requests("").items()}


@dataclass(slots=True)
class ScriptedBaseModel:
    """A base model with its reported root, weights and chat template. `comparisons` counts reads of its logprobs."""

    root: str = "x"
    weights: int = 0  # changes the logprobs
    noise: float = 0.0  # nats, as of another number type
    template: int = 0
    comparisons: int = 0

    def answer(self, path: str, body: bytes) -> dict[str, Any] | None:
        """Return the answer to one of the fixed questions, or None."""
        if path not in ("/tokenize", "/v1/completions"):
            return None
        request = json.loads(body)
        if request.get("prompt") == _QUESTIONS["tokens"]["prompt"]:
            return {"tokens": [1, 2, 3]}
        if request.get("messages") == _QUESTIONS["rendered"]["messages"]:
            return {"tokens": list(range(self.template, self.template + 50))}
        if request.get("prompt") != _QUESTIONS["likeliest"]["prompt"]:
            return None
        self.comparisons += 1
        drawn = random.Random(self.weights)
        tops = [{f"token_id:{drawn.randrange(99)}": self.noise - place - drawn.random() for place in range(10)}
                for _ in request["prompt"]]  # fmt: skip
        return {"choices": [{"index": i, "logprobs": {"top_logprobs": [top]}} for i, top in enumerate(tops)]}
