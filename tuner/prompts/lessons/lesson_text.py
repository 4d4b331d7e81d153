"""Lessons as text: which are fit to be read by every agent, and how they stand in a prompt. Pure.

A lesson was written by a language model that read what users and tools wrote, so it is checked before anybody serves
it: no address, no markup of a chat template, no quote of a transcript. What they say is judged by the trial, and by
whoever reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ratchet.store.records.tuning import Prompt
from ratchet.store.states import PromptMode

HEADER = "Lessons from earlier attempts at tasks of this kind:"
_QUOTED = 10  # words in a row
_ADDRESS = re.compile(r"\w+://|\bwww\.|[\w.+-]+@[\w-]+\.\w")
_MARKUP = re.compile(r"<\||\|>|\[/?INST\]|</?s>|<\w+_of_\w+>|</?think>|<tool_call>", re.IGNORECASE)
_WORD = re.compile(r"\w+")


def fit(answer: Any, *, max_lessons: int, max_chars: int, quoted: frozenset[tuple[str, ...]]) -> list[str]:
    """Return the lessons of a model's answer. Raises ValueError with what is wrong with it."""
    lessons = answer.get("lessons") if isinstance(answer, dict) else None
    if not isinstance(lessons, list) or not all(isinstance(one, str) for one in lessons):
        raise ValueError('it needs "lessons", a list of texts')
    said = list(dict.fromkeys(" ".join(one.split()) for one in lessons if one.strip()))
    if not 0 < len(said) <= max_lessons:
        raise ValueError(f"it has {len(said)} lessons, not 1 to {max_lessons}")
    for lesson in said:
        _check(lesson, max_chars, quoted)
    return said


def _check(lesson: str, max_chars: int, quoted: frozenset[tuple[str, ...]]) -> None:
    named = f"the lesson {lesson[:60]!r}"
    if len(lesson) > max_chars:
        raise ValueError(f"{named} has {len(lesson)} characters, at most {max_chars} are allowed")
    if not lesson.isprintable():
        raise ValueError(f"{named} holds a control character")
    if _ADDRESS.search(lesson):
        raise ValueError(f"{named} holds an address")
    if _MARKUP.search(lesson):
        raise ValueError(f"{named} holds markup of a chat template")
    if any(run in quoted for run in _runs(lesson)):
        raise ValueError(f"{named} quotes an attempt; say it in general words")


def quotable(texts: Iterable[str]) -> frozenset[tuple[str, ...]]:
    """Return every run of words that no lesson may repeat."""
    return frozenset(run for text in texts for run in _runs(text))


def _runs(text: str) -> Iterable[tuple[str, ...]]:
    words = [word.lower() for word in _WORD.findall(text)]
    return (tuple(words[place : place + _QUOTED]) for place in range(len(words) - _QUOTED + 1))


def lessons_of(prompt: Prompt | None, family: str) -> list[str]:
    """Return the lessons that a prompt holds for a family."""
    _, _, told = (prompt.text_for(family) if prompt else "").partition(HEADER)
    return [line.removeprefix("- ") for line in told.strip().splitlines()]


def with_lessons(prompt: Prompt | None, lessons: Mapping[str, Sequence[str]]) -> tuple[str, PromptMode, dict[str, str]]:
    """Return (text, mode, texts by family) of a prompt that also has these lessons; a family's older ones go."""
    text, mode = (prompt.text, prompt.mode) if prompt else ("", PromptMode.APPEND)
    families = dict(prompt.families) if prompt else {}
    for family, said in lessons.items():
        before = families.get(family, text).partition(HEADER)[0].rstrip()
        told = "\n".join([HEADER, *(f"- {lesson}" for lesson in said)])
        families[family] = f"{before}\n\n{told}" if before else told
    return text, mode, families
