"""The answer judge: compares the answer with the correct one; 1.0 or 0.0.

The answer is the response of a rollout's workflow, else the last message. The correct answer is in a file by task key,
or in a column of the task set; a task without one is a failure, not a zero.

The rules are hard to exploit: `contains` requires whole words ("4" is not in "14" or "4.5"), a short answer and no
other candidate beside it ("Rome, Paris, Oslo"); `numeric` reads only the last number, which must not be part of a list.
Neither accepts a denial ("It is not Oslo"). `answer_statement.py` describes the rules and their limits; `exact` needs
none of them.
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

from ratchet.store.records import Transcript, Verdict
from ratchet.trainer.controller.judges import GroupJudgement, opinion
from ratchet.trainer.controller.judges.kinds.answer_statement import LIMITS, is_stated
from ratchet.trainer.controller.judges.opinion import DraftVerdict, response_of
from ratchet.trainer.errors import JudgeError
from ratchet.trainer.settings.judge_specs import AnswerSpec

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?")
_EDGES = " \t\n.,;:!?\"'`*()[]{}$"


class AnswerJudge:
    """Compares with the answers of a file or of a task set."""

    concurrency = 1

    def __init__(self, spec: AnswerSpec, clock: Callable[[], float] = time.time) -> None:
        self._spec = spec
        self._answers = {} if spec.answers is None else read_answers(spec.answers)
        _check_reachable(spec, [one for correct in self._answers.values() for one in correct])
        self._clock = clock
        self.name = f"answer:{spec.match}"
        self.version = opinion.version_of(spec.model_dump_json(), sorted(self._answers.items()))

    @property
    def limits(self) -> str | None:
        """Return the limits of the rule, for `judge lint`."""
        return None if self._spec.match == "exact" else LIMITS

    def close(self) -> None:
        """Do nothing."""

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        """Return one verdict per member, in order."""
        return GroupJudgement(tuple(self._verdict(group_id, member) for member in members))

    def _verdict(self, group_id: str | None, member: Transcript) -> Verdict:
        return self._opinion(member).verdict(
            member, group_id, judge=self.name, version=self.version, judged_at=self._clock()
        )

    def _opinion(self, member: Transcript) -> DraftVerdict:
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
        """Return the correct answers of a task, or a failure."""
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
    """Return whether the answer is exactly the correct one."""
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
