"""The rule that compares the answer with the right one: 1.0 or 0.0, never between.

The answer is what the workflow of a rollout returned, else the last message; the right one stands in a file by task
key, or in a column of the task set.

Made to be hard to talk into a 1.0: `contains` needs whole words ("4" is not in "14" or "4.5"), a short answer and no
other candidate beside it ("Rome, Paris, Oslo"); `numeric` reads the last number alone, which stands in no list of
numbers; neither takes a denial ("It is not Oslo"). `stated.py` says how that is read, and what it cannot see: `exact`
alone leaves nothing to be read. A task without a right answer is a failure, not a zero.
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
from ratchet.trainer.controller.judges import Judgement, opinion
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
        _check_reachable(spec, [one for right in self._answers.values() for one in right])
        self._clock = clock
        self.name = f"answer:{spec.match}"
        self.version = opinion.version_of(spec.model_dump_json(), sorted(self._answers.items()))

    @property
    def limits(self) -> str | None:
        """What this rule cannot see, for `judge lint` to say."""
        return None if self._spec.match == "exact" else LIMITS

    def close(self) -> None:
        """Nothing to let go of."""

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> Judgement:
        """Return one verdict per member, in order."""
        return Judgement(tuple(self._verdict(group_id, member) for member in members))

    def _verdict(self, group_id: str | None, member: Transcript) -> Verdict:
        return self._opinion(member).verdict(
            member, group_id, judge=self.name, version=self.version, judged_at=self._clock()
        )

    def _opinion(self, member: Transcript) -> DraftVerdict:
        right = self._right(member)
        if isinstance(right, DraftVerdict):
            return right
        response = response_of(member)
        given = response if isinstance(response, str) else json.dumps(response)
        spec = self._spec
        matches: Mapping[str, Callable[[str, str], bool]] = {
            "exact": exact,
            "contains": lambda given, one: contains(given, one, max_chars=spec.max_chars),
            "numeric": lambda given, one: numeric(given, one, tolerance=spec.tolerance),
        }
        return DraftVerdict.of(float(any(matches[spec.match](given, one) for one in right)))

    def _right(self, member: Transcript) -> tuple[str, ...] | DraftVerdict:
        """Return the right answers of a task, or why there are none."""
        task, column = member.trajectory.task, self._spec.column
        if column is None:
            found = self._answers.get(task or "")
            missing = f"no answer for task {task!r} in {self._spec.answers}; agents send x-ratchet-task"
            return DraftVerdict.failed(missing) if found is None else found
        if member.row is None:
            return DraftVerdict.failed(f"task {task!r} is of no known task set, so that it has no column {column!r}")
        return _texts(member.row.get(column)) or DraftVerdict.failed(
            f"column {column!r} of task {task} holds no right answer; it has {', '.join(member.row)}"
        )


def _texts(right: Any) -> tuple[str, ...]:
    """Return the right answers in a value: a text or a number, or a list of them; none where it is anything else."""
    several = right if isinstance(right, list) else [right]
    usable = all(isinstance(one, str | int | float) and str(one).strip() for one in several)
    return tuple(str(one) for one in several) if usable else ()


def read_answers(file: Path) -> dict[str, tuple[str, ...]]:
    """Return the right answers by task. Raises JudgeError with the line that is wrong."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise JudgeError(f"judge answer: {file} cannot be read: {error.strerror}; set `answers`") from error
    answers: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            task, right = _row(line, f"judge answer: {file}, line {number}")
            answers[task] = right
    if not answers:
        raise JudgeError(f"judge answer: {file} holds no answers")
    return answers


def _row(line: bytes, where: str) -> tuple[str, tuple[str, ...]]:
    try:
        row: Any = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise JudgeError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict) or "task" not in row or "answer" not in row:
        raise JudgeError(f"{where}: must have `task` and `answer`")
    right = _texts(row["answer"])
    if not right:
        raise JudgeError(f"{where}: `answer` must be a text or a number, or a list of them, and not empty")
    return str(row["task"]), right


def _check_reachable(spec: AnswerSpec, right: Sequence[str]) -> None:
    """Raise JudgeError where no answer whatever could be right, so that everyone would score 0."""
    if not right:
        return  # they stand in the task set
    if spec.match == "numeric" and all(last_number(one) is None for one in right):
        raise JudgeError(f"judge answer: no answer in {spec.answers} holds a number; use match: exact or contains")
    if spec.match == "contains" and all(len(one) > spec.max_chars for one in right):
        raise JudgeError(
            f"judge answer: every right answer in {spec.answers} is longer than max_chars ({spec.max_chars}), "
            "so that none can be given: raise max_chars"
        )


def plain(text: str) -> str:
    """Return text for comparison: compatibility forms and case folded, spaces as one, punctuation at the ends gone."""
    return " ".join(folded(text).split()).strip(_EDGES)


def folded(text: str) -> str:
    """Return text in compatibility forms and case folded, spaces within lines as one."""
    lines = unicodedata.normalize("NFKC", text).casefold().splitlines()
    return "\n".join(" ".join(line.split()) for line in lines)


def exact(given: str, right: str) -> bool:
    """Whether the answer is the right one and nothing else."""
    return plain(given) == plain(right)


def contains(given: str, right: str, *, max_chars: int) -> bool:
    """Whether the right answer is stated in the given one, as whole words or a whole number."""
    if len(given) > max_chars:
        return False
    text, wanted = folded(given), plain(right)
    found = re.finditer(rf"(?<![\w])(?<!\d[.,])(?<!-){re.escape(wanted)}(?!\w|[.,]\d)", text)
    return any(is_stated(text, *match.span()) for match in found)


def numeric(given: str, right: str, *, tolerance: float) -> bool:
    """Whether the last number of the answer is the right one and is stated, `tolerance` being relative."""
    last, wanted = _last(text := folded(given)), last_number(right)
    if last is None or wanted is None or not is_stated(text, *last.span()):
        return False
    return math.isclose(_value(last), wanted, rel_tol=tolerance, abs_tol=tolerance * 1e-3)


def last_number(text: str) -> float | None:
    """Return the last number in a text, commas between thousands allowed; None where there is none."""
    last = _last(text)
    return None if last is None else _value(last)


def _last(text: str) -> re.Match[str] | None:
    found = [match for match in _NUMBER.finditer(text) if any(map(str.isdigit, match[0]))]
    return found[-1] if found else None


def _value(number: re.Match[str]) -> float:
    return float(number[0].replace(",", ""))
