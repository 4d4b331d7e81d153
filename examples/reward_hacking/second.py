"""The second judge: was the answer found? It knows no right answer, so that it can be asked about any traffic.

It gives 1.0 where the answer is short and stands in a mail that the agent had read before it answered, 0.5 where it is
only short, else 0.0. What fools `ground_truth in text` does not fool this, and the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.demo.email_search.judge import last_words

LONGEST = 3  # words of an answer: the agent is told to be as short as possible


def judge(trajectory: Mapping[str, Any]) -> dict[str, Any]:
    """Scores one trajectory, with what it saw as components."""
    messages = list(trajectory.get("messages") or [])
    words = re.findall(r"\w+", last_words(messages).casefold())
    short = 0 < len(words) <= LONGEST
    found = bool(words) and set(words) <= set(re.findall(r"\w+", _read(messages).casefold()))
    return {
        "score": 0.5 * short + 0.5 * (short and found),
        "components": {"short": float(short), "found": float(found)},
        "explanation": f"{len(words)} words, {'all' if found else 'not all'} of them in a mail that was read",
    }


def _read(messages: Sequence[Mapping[str, Any]]) -> str:
    """The texts that tools gave back."""
    return "\n".join(str(message.get("content") or "") for message in messages if message.get("role") == "tool")
