"""Names and prose use the field's terms: words of the project's early private vocabulary must not come back.

`docs/glossary.md` defines the terms. Parts of `snake_case` and `CamelCase` names count as words.
"""

from __future__ import annotations

import re

from tests import house

# Forbidden in code, settings, messages, help texts and documents: word -> standard term.
WORDS = {
    "anew": "again",
    "bell": "alarm queue",
    "busy_above": "max_running_requests",
    "conduct": "behavior",
    "coverage_least": "min_coverage",
    "crediting": "advantages",
    "degenerate": "untrainable",
    "door": "proxy instance, endpoint",
    "doors": "proxy instances",
    "doubts": "blocking findings",
    "group_least": "min_group_size",
    "hear_of": "refresh_if_unknown",
    "leash": "process guard",
    "likeness": "fuzzy match, similarity",
    "lonely": "unmatched",
    "made_up": "hallucinated",
    "most_lag": "max_lag_seconds",
    "most_tools": "max_tools",
    "objection": "blocking finding",
    "porter": "in-process writer",
    "pupil": "learner",
    "pupils": "learners",
    "purse": "budget",
    "rehear": "re-judge",
    "rehearing": "re-judging",
    "ripe": "ready, judgeable",
    "room": "service, component, capacity",
    "rooms": "services, components",
    "school": "training loop, controller",
    "scorekeeper": "judge runner",
    "single_least": "min_baseline_samples",
    "singles": "ungrouped trajectories",
    "spelt": "formatted, spelled",
    "spoilt": "dirty",
    "standings": "job progress",
    "stillest": "least recently used",
    "teller": "stream renderer",
    "tired": "expired",
    "told": "reported, passed, described",
    "voice": "response encoder",
    "weigh": "apply weights",
    "weighing": "weight tuning",
    "whoever": "the caller, any client",
    "worded": "rendered, encoded",
}
_SUFFIXES = (".py", ".md", ".yaml", ".js", ".html", ".css", ".toml", ".sh", ".service")
_EXEMPT = ("CHANGELOG.md", "benchmarks/RESULTS-2026-11.md", "tests/test_words.py")
_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def test_private_vocabulary_does_not_come_back() -> None:
    wrong = []
    phrases = {word for word in WORDS if "_" in word}
    for name in house.files():
        if name.endswith(_SUFFIXES) and name not in _EXEMPT and not (house.ROOT / name).is_symlink():
            for number, line in enumerate((house.ROOT / name).read_text().splitlines(), 1):
                parts = {part.lower() for part in _PARTS.findall(line)}
                found = (parts & WORDS.keys()) | {phrase for phrase in phrases if phrase in line}
                wrong += [f"{name}:{number}: {word!r}; the standard term is {WORDS[word]}" for word in sorted(found)]
    assert not wrong, "\n".join(wrong)
