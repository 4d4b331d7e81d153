"""The judge: 1.0 if the answer is the review's label and nothing else, else 0.0. An unknown review is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.demo.reviews.tasks import label_of, matches


def judge(trajectory: Mapping[str, Any], response: str) -> float:
    """Score one trajectory: `response` is the agent's last answer; the review is the last message of the user.

    Raises LookupError for a review that is not of the task set.
    """
    questions = [message["content"] for message in trajectory["messages"] if message["role"] == "user"]
    return float(matches(response, label_of(questions[-1])))
