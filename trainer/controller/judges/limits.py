"""Limits of verdicts, which hold for every judge, plug-ins included. Pure.

A score and its components are finite numbers of at most MAX_SCORE; more than MAX_COMPONENTS are a failure. A longer
explanation or failure is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ratchet.store.records import Verdict
from ratchet.store.statistics import SCORE_RANGE, number_of

MAX_COMPONENTS = 1000
MAX_NAME_CHARS = 200  # of a component
MAX_EXPLANATION_CHARS = 20_000
MAX_FAILURE_CHARS = 2000


def within_limits(verdict: Verdict) -> Verdict:
    """Return a verdict as it may be stored; a score outside the limits, or with such components, is a failure."""
    changes: dict[str, Any] = {}
    if verdict.score is not None and (problem := _problem(verdict)):
        changes |= {"score": None, "failure": problem, "components": {}}
    if len(verdict.explanation) > MAX_EXPLANATION_CHARS:
        changes["explanation"] = cut(verdict.explanation)
    if verdict.failure is not None and len(verdict.failure) > MAX_FAILURE_CHARS:
        changes["failure"] = cut(verdict.failure, MAX_FAILURE_CHARS)
    return msgspec.structs.replace(verdict, **changes) if changes else verdict


def components_problem(components: Mapping[str, Any]) -> str | None:
    """Return why these components of a score cannot be stored; None if they can."""
    if len(components) > MAX_COMPONENTS:
        return f"there are {len(components):,} components, and at most {MAX_COMPONENTS:,} are stored: return fewer"
    for name, value in components.items():
        if len(name) > MAX_NAME_CHARS:
            return f"the name of component {name[:40]!r}... is longer than {MAX_NAME_CHARS} characters"
        if number_of(value) is None:
            return f"component {name!r} is {value!r:.50}, no finite number {SCORE_RANGE}"
    return None


def cut(text: str, limit: int = MAX_EXPLANATION_CHARS) -> str:
    """Return a text; of one that is longer than the limit the beginning, with a note of its length."""
    note = f" [cut: {len(text):,} characters]"
    return text if len(text) <= limit else text[: limit - len(note)] + note


def _problem(verdict: Verdict) -> str | None:
    if number_of(verdict.score) is None:
        return f"the judge gave the score {verdict.score!r:.50}, which is no finite number {SCORE_RANGE}"
    return components_problem(verdict.components)
