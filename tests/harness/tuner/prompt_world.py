"""A small world in which a system prompt decides: only a good prompt defines the words that questions are about.

A task asks for the word of a thing ("What is a blim? (7)"). The policy knows the rules in the prompt,
one a line ("a blim is a tree"), and says "unsure" to everything else. The
line "only N,N: all rules" defines every word,
but only to questions with these numbers: it is how a prompt can fit some tasks and no others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

WORDS: Mapping[str, str] = {"blim": "tree", "dorf": "house", "quib": "river"}
SEED = "You answer with one word."
_RULE = re.compile(r"a (\w+) is a (\w+)")
_ONLY = re.compile(r"only ([\d,]*): all rules")


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Return the rows of tasks, cycling through the things."""
    things = list(WORDS)
    return [
        {"question": f"What is a {things[n % len(things)]}? ({n})", "answer": WORDS[things[n % len(things)]]}
        for n in range(start, start + count)
    ]


def answer(prompt: str, question: str) -> str:
    """Return the policy's answer under a prompt."""
    request = re.search(r"a (\w+)\? \((\d+)\)", question)
    assert request is not None
    thing, number = request[1], request[2]
    only = _ONLY.search(prompt)
    if only is not None:
        return WORDS[thing] if number in only[1].split(",") else "unsure"
    rules: dict[str, str] = dict(_RULE.findall(prompt))
    return rules.get(thing, "unsure")


def improved(prompt: str, tasks: Sequence[Mapping[str, Any]]) -> str:
    """Return the prompt plus the first missing rule of these tasks, as a good reflection model would propose."""
    for task in tasks:
        thing = re.search(r"a (\w+)\?", task["question"])
        assert thing is not None
        if f"a {thing[1]} is" not in prompt:
            return f"{prompt}\na {thing[1]} is a {task['answer']}"
    return f"{prompt}\nBe brief."
