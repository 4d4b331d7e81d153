"""The answer judge: compares the answer with the correct one; 1.0 or 0.0.

The answer is the response of a rollout's workflow, else the last message. The correct answer is in a file by task key,
or in a column of the task set; a task without one is a failure, not a zero.

The rules are hard to exploit: `contains` requires whole words ("4" is not in "14" or "4.5"), a short answer and no
other candidate beside it ("Rome, Paris, Oslo"); `numeric` reads only the last number, which must not be part of a list.
Neither accepts a denial ("It is not Oslo"); `exact` needs none of these rules.
"""

from __future__ import annotations

import json
import math
import re
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ratchet.store.records import Transcript
from ratchet.trainer.errors import JudgeError
from ratchet.trainer.judges.judgement import (
    DraftVerdict,
    NamedJudge,
    response_of,
    version_of,
)
from ratchet.trainer.settings.judge_specs import AnswerSpec

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?")
_EDGES = " \t\n.,;:!?\"'`*()[]{}$"


class AnswerJudge(NamedJudge):
    """Compares with the answers of a file or of a task set."""

    def __init__(self, spec: AnswerSpec, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self._spec = spec
        self._answers = {} if spec.answers is None else read_answers(spec.answers)
        _check_reachable(spec, [one for correct in self._answers.values() for one in correct])
        self.name = f"answer:{spec.match}"
        self.version = version_of(spec.model_dump_json(), sorted(self._answers.items()))

    @property
    def limits(self) -> str | None:
        """Return the limits of the rule, for `judge lint`."""
        return None if self._spec.match == "exact" else LIMITS

    def opinion(self, member: Transcript) -> DraftVerdict:
        correct = self._correct_answers(member)
        if isinstance(correct, DraftVerdict):
            return correct
        response = response_of(member)
        answer = response if isinstance(response, str) else json.dumps(response)
        spec = self._spec
        matches: Mapping[str, Callable[[str, str], bool]] = {
            "exact": exact,
            "contains": lambda answer, one: contains(answer, one, max_chars=spec.max_chars),
            "numeric": lambda answer, one: numeric(answer, one, tolerance=spec.tolerance),
        }
        return DraftVerdict.of(float(any(matches[spec.match](answer, one) for one in correct)))

    def _correct_answers(self, member: Transcript) -> tuple[str, ...] | DraftVerdict:
        task, column = member.trajectory.task, self._spec.column
        if column is None:
            found = self._answers.get(task or "")
            missing = f"no answer for task {task!r} in {self._spec.answers}; agents send x-ratchet-task"
            return DraftVerdict.failed(missing) if found is None else found
        if member.row is None:
            return DraftVerdict.failed(f"task {task!r} is in no known task set, so it has no column {column!r}")
        return _texts(member.row.get(column)) or DraftVerdict.failed(
            f"column {column!r} of task {task} has no correct answer; columns: {', '.join(member.row)}"
        )


def _texts(correct: Any) -> tuple[str, ...]:
    """Return the correct answers in a value: a text, a number or a list of them; none for other values."""
    several = correct if isinstance(correct, list) else [correct]
    usable = all(isinstance(one, str | int | float) and str(one).strip() for one in several)
    return tuple(str(one) for one in several) if usable else ()


def read_answers(file: Path) -> dict[str, tuple[str, ...]]:
    """Return the correct answers by task. Raises JudgeError with the number of an invalid line."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise JudgeError(f"judge answer: {file} cannot be read: {error.strerror}; set `answers`") from error
    answers: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            task, correct = _row(line, f"judge answer: {file}, line {number}")
            answers[task] = correct
    if not answers:
        raise JudgeError(f"judge answer: {file} has no answers")
    return answers


def _row(line: bytes, where: str) -> tuple[str, tuple[str, ...]]:
    try:
        row: Any = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise JudgeError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict) or "task" not in row or "answer" not in row:
        raise JudgeError(f"{where}: must have `task` and `answer`")
    correct = _texts(row["answer"])
    if not correct:
        raise JudgeError(f"{where}: `answer` must be a text or a number, or a list of them, and not empty")
    return str(row["task"]), correct


def _check_reachable(spec: AnswerSpec, correct: Sequence[str]) -> None:
    """Raise JudgeError if no answer could ever be correct, so that every score would be 0."""
    if not correct:
        return  # they are in the task set
    if spec.match == "numeric" and all(last_number(one) is None for one in correct):
        raise JudgeError(f"judge answer: no answer in {spec.answers} has a number; use match: exact or contains")
    if spec.match == "contains" and all(len(one) > spec.max_chars for one in correct):
        raise JudgeError(
            f"judge answer: every correct answer in {spec.answers} is longer than max_chars ({spec.max_chars}): raise "
            "max_chars"
        )


def plain(text: str) -> str:
    """Return text for comparison: folded, without line breaks and outer punctuation."""
    return " ".join(folded(text).split()).strip(_EDGES)


def folded(text: str) -> str:
    """Return NFKC-normalized, case-folded text with single spaces within lines."""
    lines = unicodedata.normalize("NFKC", text).casefold().splitlines()
    return "\n".join(" ".join(line.split()) for line in lines)


def exact(answer: str, correct: str) -> bool:
    return plain(answer) == plain(correct)


def contains(answer: str, correct: str, *, max_chars: int) -> bool:
    """Return whether the answer states the correct one, as whole words or a whole number."""
    if len(answer) > max_chars:
        return False
    text, expected = folded(answer), plain(correct)
    found = re.finditer(rf"(?<![\w])(?<!\d[.,])(?<!-){re.escape(expected)}(?!\w|[.,]\d)", text)
    return any(is_stated(text, *match.span()) for match in found)


def numeric(answer: str, correct: str, *, tolerance: float) -> bool:
    """Return whether the answer states the correct number as its last one; `tolerance` is relative."""
    last, expected = _last(text := folded(answer)), last_number(correct)
    if last is None or expected is None or not is_stated(text, *last.span()):
        return False
    return math.isclose(_value(last), expected, rel_tol=tolerance, abs_tol=tolerance * 1e-3)


def last_number(text: str) -> float | None:
    """Return the last number in a text, which may have thousands separators; None if there is none."""
    last = _last(text)
    return None if last is None else _value(last)


def _last(text: str) -> re.Match[str] | None:
    found = [match for match in _NUMBER.finditer(text) if any(map(str.isdigit, match[0]))]
    return found[-1] if found else None


def _value(number: re.Match[str]) -> float:
    return float(number[0].replace(",", ""))


# Decides whether a text states an answer, rather than denies it or lists it among several candidates. Pure.
#
# The rules match words, they do not parse sentences. In doubt the answer is not stated, so that agents gain nothing
# from lists, denials or hedging.

LIMITS = (
    "the rule matches words: it detects lists (Rome, Oslo; Rome or Oslo) and common English denials, but neither "
    "several statements (It is Rome. It is Oslo.) nor other denials; match: exact avoids both"
)

_SENTENCE = re.compile(r"(?<!\n\d)(?<!\n\d\d)[.!?](?=\s|$)")  # "1. Rome" is a line of a list
_CLAUSE = re.compile(rf"{_SENTENCE.pattern}|[;:\n,]|(?<!anything )\bbut\b")
_SEPARATOR = re.compile(r"[,;/|\n&]|\b(?:or|and|nor)\b")
_NOT = r"(?:is|was|are|do|does|wo|ca)n['\u2019]t"
_DENIED_BEFORE = re.compile(
    rf"\b(?:not|no|never|neither|nor|cannot|without|except|unlike|hardly|impossible|{_NOT}|instead of|rather than|"
    r"other than|anything but)\b"
)
_HARMLESS = re.compile(r"\b(?:no|without(?: a)?|not any|never any) doubt\b")
_DENIED_AFTER = re.compile(rf"^[\"'*\s]*(?:(?:is|was|would be)\s+(?:not|wrong|false|incorrect)|not|{_NOT})\b")
# A short piece that starts so is a remark, not another candidate: "Oslo, of course", "4, which is even".
_REMARK = re.compile(
    r"(?:not|of|in|on|at|by|for|from|to|with|as|i|it|we|you|he|she|they|that|this|there|which|who|where|when|because|"
    r"since|so|if|is|are|was|were|has|have|then|thus|hence|please|thanks|yes|no|sir|although|though|while|according)\b"
)
_OPENING = re.compile(
    r"(?:therefore|thus|hence|so|then|after|before|finally|consequently|altogether|overall|ok|okay|sure|yes|no|well|"
    r"actually|clearly|as|if|since|because|when|while|although|though|given|according|based|by|from|in|for|with|to|"
    r"of course|i think|i believe|\w+ing)\b|.*:$"
)
_MARKS = " \t\n\"'`*()[]{}$.!?"
_BULLET = re.compile(r"^(?:[-*\u2022]|\d+[.)])\s+|^(?:either|both|the|a|an)\s+")
_NEAR = 1000  # characters
_EXTRA_WORDS = 1  # of another candidate


def is_stated(text: str, start: int, end: int) -> bool:
    """Return whether a folded text states its piece from `start` to `end`, judged by the text around it."""
    begin = max(0, start - _NEAR)
    text, start, end = text[begin : end + _NEAR], start - begin, end - begin
    return not _is_denied(text, start, end) and not _is_listed("\n" + text, start + 1, end + 1)


def _is_denied(text: str, start: int, end: int) -> bool:
    begin = max((match.end() for match in _CLAUSE.finditer(text, 0, start)), default=0)
    before = _HARMLESS.sub(" ", text[begin:start])
    return _DENIED_BEFORE.search(before) is not None or _DENIED_AFTER.match(text[end:]) is not None


def _is_listed(text: str, start: int, end: int) -> bool:
    """Return whether the sentence has another candidate beside the piece."""
    begin = max((match.end() for match in _SENTENCE.finditer(text, 0, start)), default=0)
    stop = next((match.start() for match in _SENTENCE.finditer(text, end)), len(text))
    size = len(text[start:end].split())
    after = _SEPARATOR.split(text[end:stop])
    if len(after) > 1 and not _words(after[0]):
        following = next((piece for piece in after[1:] if _words(piece)), "")
        if _is_candidate(following, size):
            return True
    before, between = _SEPARATOR.split(text[begin:start]), _SEPARATOR.findall(text[begin:start])
    if _words(before[-1]) or _words(after[0]):
        return False  # the piece is part of a clause
    known = [(piece, mark) for piece, mark in zip(before[:-1], between, strict=True) if _words(piece)]
    return bool(known) and (_is_beside(*known[-1], size) or any(_is_candidate(piece, size) for piece, _ in known))


def _is_beside(piece: str, mark: str, size: int) -> bool:
    """Return whether the piece before the answer is another candidate rather than an opening."""
    if mark == "\n":
        return _is_candidate(piece, size)
    return mark not in ",;" or not _OPENING.match(" ".join(piece.split()))


def _is_candidate(piece: str, size: int) -> bool:
    words = _words(piece)
    phrase = " ".join(words)
    return bool(words) and len(words) <= size + _EXTRA_WORDS and not (_REMARK.match(phrase) or _OPENING.match(phrase))


def _words(piece: str) -> list[str]:
    return _BULLET.sub("", piece.lstrip()).strip(_MARKS).split()
