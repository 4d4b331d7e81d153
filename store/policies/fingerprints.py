"""How a base model's server answers fixed questions: enough to know it again without its files.

    tokens     the ids of a fixed text: the tokenizer
    rendered   the ids of a fixed conversation: the chat template
    likeliest  the likeliest next tokens after fixed texts, with their logprobs: the weights

Pure: makes requests and compares answers, for whoever speaks to the server. Logprobs of one model move by 0.001 to 0.04
nats with number type, batch and hardware; other models, also an instruction-tuned one of the same family, differ by
tenths of a nat and more. What differs by less than `TOLERANCE` is not seen here: only digests of the files see that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from math import exp
from statistics import fmean
from typing import Any

TOLERANCE = 0.15  # nats: mean over the questions, each token by its probability
_ALIKE = 0.8  # share of rendered ids that stay: a template may write today's date
_MOST = 10  # likeliest tokens that are asked for
_TEXT = "The quick brown fox; naïve café № 42 — 東京 🙂\n\tdef f(x): return {'a': [x, 3.14]}"
_MESSAGES = (
    {"role": "system", "content": "You are a careful assistant that answers in one sentence."},
    {"role": "user", "content": "Which river flows through Paris?"},
    {"role": "assistant", "content": "The Seine flows through Paris."},
    {"role": "user", "content": "And through London?"},
)
_QUESTIONS = (
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
    """Return what to ask a server of the base model: path and body, by part of the fingerprint."""
    asked = {"model": model, "prompt": list(_QUESTIONS), "max_tokens": 1, "temperature": 1.0, "logprobs": _MOST}
    return {
        "tokens": ("/tokenize", {"model": model, "prompt": _TEXT}),
        "rendered": ("/tokenize", {"model": model, "messages": list(_MESSAGES), "add_generation_prompt": True}),
        "likeliest": ("/v1/completions", asked | {"return_tokens_as_token_ids": True}),
    }


def read(part: str, answer: Any) -> list[Any]:
    """Return a part of the fingerprint from an answer's body. Raises ValueError where it is no such answer."""
    try:
        if part != "likeliest":
            return [int(token) for token in answer["tokens"]]
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        tops = [choice["logprobs"]["top_logprobs"][0] for choice in choices]
        return [{str(token): min(0.0, round(float(value), 5)) for token, value in top.items()} for top in tops]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"no {part} in the answer") from error


def difference(known: Answers, seen: Answers) -> str | None:
    """Return in words in what a server differs from the known one; None if it is the same as far as can be seen."""
    found = []
    if _both(known, seen, "tokens") and known["tokens"] != seen["tokens"]:
        found.append("its tokenizer gives other ids")
    if _both(known, seen, "rendered"):
        alike = SequenceMatcher(None, known["rendered"], seen["rendered"], autojunk=False).ratio()
        if alike < _ALIKE:
            found.append("its chat template gives other prompts")
    if _both(known, seen, "likeliest"):
        nats = distance(known["likeliest"], seen["likeliest"])
        if nats > TOLERANCE:
            found.append(f"its next-token logprobs differ by {nats:.2f} nats on average")
    return ", ".join(found) or None


def distance(one: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> float:
    """Return the mean difference in nats between likeliest next tokens, each token weighted by its probability.

    A token that one side does not list counts with the least logprob that it does list: the difference is at least so.
    """
    if len(one) != len(other) or not one:
        return float("inf")
    return fmean(_apart(a, b) for a, b in zip(one, other, strict=True))


def _apart(one: Mapping[str, float], other: Mapping[str, float]) -> float:
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
