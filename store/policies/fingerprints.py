"""Fingerprints of a base model's server, which identify the model without its files. Pure.

    tokens     token ids of a fixed text, for the tokenizer
    rendered   token ids of a fixed conversation, for the chat template
    likeliest  the likeliest next tokens after fixed texts with their logprobs, for the weights

Builds requests and compares answers; the caller sends them. Logprobs of one model vary by 0.001 to 0.04 nats with
dtype, batch and hardware. Other models, even an instruction-tuned one of the same family, differ by tenths of a nat or
more. Differences below `TOLERANCE` are not detected; digests of the files detect them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from math import exp
from statistics import fmean
from typing import Any

TOLERANCE = 0.15  # nats: mean over the prompts, tokens weighted by probability
_MIN_SIMILARITY = 0.8  # of rendered ids: a template may contain the current date
_TOP_LOGPROBS = 10
_TEXT = "The quick brown fox; naïve café № 42 — 東京 🙂\n\tdef f(x): return {'a': [x, 3.14]}"
_MESSAGES = (
    {"role": "system", "content": "You are a careful assistant that answers in one sentence."},
    {"role": "user", "content": "Which river flows through Paris?"},
    {"role": "assistant", "content": "The Seine flows through Paris."},
    {"role": "user", "content": "And through London?"},
)
_PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return",
    "Question: What is 17 + 25?\nAnswer:",
    "User: Please summarise the meeting in one sentence.\nAssistant:",
    "Dear team,\n\nI am writing to",
    '{"name": "search", "arguments": {"',
    "Once upon a time",
    "In conclusion, the results show that",
)

Answers = Mapping[str, Any]


def requests(model: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the requests to a server: path and body, by part of the fingerprint."""
    completion = {
        "model": model, "prompt": list(_PROMPTS), "max_tokens": 1, "temperature": 1.0, "logprobs": _TOP_LOGPROBS,
    }  # fmt: skip
    return {
        "tokens": ("/tokenize", {"model": model, "prompt": _TEXT}),
        "rendered": ("/tokenize", {"model": model, "messages": list(_MESSAGES), "add_generation_prompt": True}),
        "likeliest": ("/v1/completions", completion | {"return_tokens_as_token_ids": True}),
    }


def read(part: str, answer: Any) -> list[Any]:
    """Return a part of the fingerprint from a response body. Raises ValueError for an unexpected body."""
    try:
        if part != "likeliest":
            return [int(token) for token in answer["tokens"]]
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        tops = [choice["logprobs"]["top_logprobs"][0] for choice in choices]
        return [{str(token): min(0.0, round(float(value), 5)) for token, value in top.items()} for top in tops]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"no {part} in the answer") from error


def difference(known: Answers, seen: Answers) -> str | None:
    """Return the differences between a known server and another one as text; None if there are none."""
    found = []
    if _both(known, seen, "tokens") and known["tokens"] != seen["tokens"]:
        found.append("its tokenizer gives other ids")
    if _both(known, seen, "rendered"):
        similarity = SequenceMatcher(None, known["rendered"], seen["rendered"], autojunk=False).ratio()
        if similarity < _MIN_SIMILARITY:
            found.append("its chat template gives other prompts")
    if _both(known, seen, "likeliest"):
        nats = distance(known["likeliest"], seen["likeliest"])
        if nats > TOLERANCE:
            found.append(f"its next-token logprobs differ by {nats:.2f} nats on average")
    return ", ".join(found) or None


def distance(one: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> float:
    """Return the mean difference in nats between likeliest next tokens, each token weighted by its probability.

    A token that one side does not list counts with the lowest logprob of that side, so the result is a lower bound.
    """
    if len(one) != len(other) or not one:
        return float("inf")
    return fmean(_weighted_difference(a, b) for a, b in zip(one, other, strict=True))


def _weighted_difference(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    least_one, least_other = min(one.values(), default=0.0), min(other.values(), default=0.0)
    weights, moved = 0.0, 0.0
    for token in {*one, *other}:
        a, b = one.get(token, least_one), other.get(token, least_other)
        weight = (exp(a) + exp(b)) / 2
        weights += weight
        moved += weight * abs(a - b)
    return moved / weights if weights else 0.0


def _both(known: Answers, seen: Answers, part: str) -> bool:
    return bool(known.get(part)) and bool(seen.get(part))
