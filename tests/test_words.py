"""Names and prose use the field's terms: words of the project's early private vocabulary must not come back.

`docs/glossary.md` defines the terms. `WORDS` is checked in all text, `NAMES` in Python identifiers; both see the parts
of `snake_case` and `CamelCase` names.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache

from tests import house

# Forbidden in code, settings, messages, help texts and documents: word -> standard term.
WORDS = {
    "anew": "again",
    "bell": "alarm queue",
    "busy_above": "max_running_requests",
    "carrier": "store writer",
    "casting": "role resolution",
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
    "shadow": "resample",
    "shadowing": "resampling",
    "shadows": "resamples",
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
# Forbidden as a part of a Python name only: ordinary English words that say nothing as a name.
NAMES = {
    "asked": "request, question",
    "begun": "started",
    "company": "peers",
    "credit": "advantage estimator",
    "fitting": "truncated",
    "heard": "received, applied",
    "longest": "max length",
    "remembered": "cached",
    "ripe": "ready",
    "said": "text, output, message",
    "standing": "status, progress",
    "still": "unchanged, cleared",
    "tell": "report, log, describe",
    "wants": "requires, accepts",
    "works": "job progress",
}
# Uses in another sense.
ALLOWED = {
    "carrier": r"aircraft carrier|propagat\w+ carrier|carrier\.(inject|extract)",
    "casting": r"(type|up|down)-?casting",
    "shadow": r"(box|text|drop)-?[sS]hadow|shadow(ed)? traffic|--shadow",
    "standing": r"long-standing|outstanding",
}
_SUFFIXES = (".py", ".md", ".yaml", ".js", ".html", ".css", ".toml", ".sh", ".service")
_EXEMPT = ("CHANGELOG.md", "benchmarks/RESULTS-2026-11.md", "tests/test_words.py")
_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


@cache
def _texts() -> dict[str, str]:
    names = [name for name in house.files() if name.endswith(_SUFFIXES) and name not in _EXEMPT]
    return {name: (house.ROOT / name).read_text() for name in names if not (house.ROOT / name).is_symlink()}


def _parts(text: str) -> set[str]:
    return {part.lower() for part in _PARTS.findall(text)}


def _hits() -> Iterator[tuple[str, str]]:
    """Yield (word, file:line)."""
    phrases = {word for word in WORDS if "_" in word}
    for name, text in _texts().items():
        for number, line in enumerate(text.splitlines(), 1):
            found = (_parts(line) & WORDS.keys()) | {phrase for phrase in phrases if phrase in line}
            yield from ((word, f"{name}:{number}") for word in found if not _is_allowed(word, line))
        if name.endswith(".py"):
            for token in tokenize.generate_tokens(io.StringIO(text).readline):
                if token.type == tokenize.NAME:
                    yield from ((word, f"{name}:{token.start[0]}") for word in _parts(token.string) & NAMES.keys())


def _is_allowed(word: str, line: str) -> bool:
    pattern = ALLOWED.get(word)
    return pattern is not None and word not in _parts(re.sub(pattern, "", line))


def test_private_vocabulary_does_not_come_back() -> None:
    terms = NAMES | WORDS
    wrong = sorted(f"{place}: {word!r}; the standard term is {terms[word]}" for word, place in set(_hits()))
    assert not wrong, "\n".join(wrong)
