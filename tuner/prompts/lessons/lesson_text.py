"""Lessons as text: validation, and their form in a prompt. Pure.

A language model wrote them after reading texts of users and tools, so they are checked before they are served: no
address, no chat-template markup, no quote of a transcript. The trial and their readers judge their content.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ratchet.store.records.tuning import Prompt
from ratchet.store.states import PromptMode

HEADER = "Lessons from earlier attempts at tasks of this kind:"
_QUOTED = 10  # consecutive words that count as a quote
_ADDRESS = re.compile(r"\w+://|\bwww\.|[\w.+-]+@[\w-]+\.\w")
_MARKUP = re.compile(r"<\||\|>|\[/?INST\]|</?s>|<\w+_of_\w+>|</?think>|<tool_call>", re.IGNORECASE)
_WORD = re.compile(r"\w+")


def fit(answer: Any, *, max_lessons: int, max_chars: int, quoted: frozenset[tuple[str, ...]]) -> list[str]:
    """Return the lessons in a model's answer. Raises ValueError with the reason."""
    lessons = answer.get("lessons") if isinstance(answer, dict) else None
    if not isinstance(lessons, list) or not all(isinstance(one, str) for one in lessons):
        raise ValueError('it needs "lessons", a list of strings')
    distinct = list(dict.fromkeys(" ".join(one.split()) for one in lessons if one.strip()))
    if not 0 < len(distinct) <= max_lessons:
        raise ValueError(f"it has {len(distinct)} lessons, not 1 to {max_lessons}")
    for lesson in distinct:
        _check(lesson, max_chars, quoted)
    return distinct


def _check(lesson: str, max_chars: int, quoted: frozenset[tuple[str, ...]]) -> None:
    named = f"the lesson {lesson[:60]!r}"
    if len(lesson) > max_chars:
        raise ValueError(f"{named} has {len(lesson)} characters, at most {max_chars} are allowed")
    if not lesson.isprintable():
        raise ValueError(f"{named} contains a control character")
    if _ADDRESS.search(lesson):
        raise ValueError(f"{named} contains an address")
    if _MARKUP.search(lesson):
        raise ValueError(f"{named} contains chat-template markup")
    if any(run in quoted for run in _word_sequences(lesson)):
        raise ValueError(f"{named} quotes a rollout; use general words")


def quotable(texts: Iterable[str]) -> frozenset[tuple[str, ...]]:
    """Return the word sequences that no lesson may repeat."""
    return frozenset(run for text in texts for run in _word_sequences(text))


def _word_sequences(text: str) -> Iterable[tuple[str, ...]]:
    words = [word.lower() for word in _WORD.findall(text)]
    return (tuple(words[place : place + _QUOTED]) for place in range(len(words) - _QUOTED + 1))


def lessons_of(prompt: Prompt | None, family: str) -> list[str]:
    """Return the lessons in a prompt for a family."""
    _, _, listed = (prompt.text_for(family) if prompt else "").partition(HEADER)
    return [line.removeprefix("- ") for line in listed.strip().splitlines()]


def with_lessons(prompt: Prompt | None, lessons: Mapping[str, Sequence[str]]) -> tuple[str, PromptMode, dict[str, str]]:
    """Return (text, mode, texts by family) of a prompt with these lessons, which replace a family's older ones."""
    text, mode = (prompt.text, prompt.mode) if prompt else ("", PromptMode.APPEND)
    families = dict(prompt.families) if prompt else {}
    for family, added in lessons.items():
        before = families.get(family, text).partition(HEADER)[0].rstrip()
        listed = "\n".join([HEADER, *(f"- {lesson}" for lesson in added)])
        families[family] = f"{before}\n\n{listed}" if before else listed
    return text, mode, families
