"""An answer quality that depends on the system prompt, and a judge of such answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SCORES = {"good": 1.0, "fair": 0.5, "awful": 0.0}


def by_prompt(body: Mapping[str, Any]) -> dict[str, str]:
    """Answer `good` if the system prompt contains `better`, `awful` if it contains `worse`, else `fair`."""
    prompt = next((str(m["content"]) for m in body["messages"] if m["role"] in ("system", "developer")), "")
    return {"say": "good" if "better" in prompt else "awful" if "worse" in prompt else "fair"}


def judged(response: str) -> float:
    """Score such an answer."""
    return _SCORES[response]
