"""Check-up: every reason why rollouts of a workflow would teach nothing. Pure, but for the judge that is asked.

It looks at attempts at one task as the trainer would: which calls came, which of their tokens may carry loss, whether
the attempts differ, whether the judge tells answers apart, whether such attempts become a group in time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ratchet.store.reasons import describe_untrained
from ratchet.store.records import Transcript, WorkflowResult
from ratchet.store.records.tuning import Rollout
from ratchet.store.states import CallState, RolloutState
from ratchet.trainer.controller.judges import Judge
from ratchet.trainer.rows.build_rows import build_rows
from ratchet.trainer.rows.roles import Roles
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from ratchet.tuner.rollouts.scoring import NO_CALL
from ratchet.tuner.settings.tuner_settings import TunerSettings

_LEAST_SPREAD = 1e-9
_VALUES_TRIED = 8  # of the row, as answers that might be right
_NOT_OF_THE_ROW = 3  # answers that are tried before them


@dataclass(frozen=True, slots=True)
class Reason:
    """Why nothing would be learnt, and what to do; `about` is the step that it was seen in."""

    about: str
    seen: str
    remedy: str


def of_rollouts(rollouts: Sequence[Rollout]) -> Iterator[Reason]:
    """Yield what is wrong with how the attempts ended."""
    failures = Counter(one.failure for one in rollouts if one.state is RolloutState.FAILED)
    for failure, times in failures.most_common(3):
        remedy = "mend it: failed rollouts are kept and count as failures"
        yield Reason("rollouts", f"{times} of {len(rollouts)} failed: {failure}", remedy)


def of_calls(transcripts: Sequence[Transcript], task_id: str, alias: str, roles: Roles) -> Iterator[Reason]:
    """Yield why what the agent sampled could not be trained."""
    if not transcripts:
        yield Reason("calls", NO_CALL, "in a program: OPENAI_BASE_URL and OPENAI_MODEL; look at the proxy's log")
    tokens: Counter[str] = Counter()
    trained = 0
    for transcript in transcripts:
        rows = build_rows(transcript.trajectory.id, transcript.calls, 0.0, roles)
        trained += sum(sum(row.mask) for row in rows.rows)
        tokens.update(rows.untrained)
    if transcripts and not trained:
        answered = any(call.state is CallState.ANSWERED for one in transcripts for call in one.calls)
        why = (
            describe_untrained(tokens)
            if tokens
            else "the calls have no sampled token"
            if answered
            else "no call was answered"
        )
        yield Reason("tokens", f"no sampled token could be trained: {why}", "see docs/training.md")
    yield from _of_runs(transcripts, task_id, alias)
    if len(transcripts) > 1 and trained and len({_sampled(one) for one in transcripts}) == 1:
        remedy = "sample at temperature 1.0, without a seed: attempts that do not differ teach nothing"
        yield Reason("attempts", f"all {len(transcripts)} attempts sampled the same tokens", remedy)


def _of_runs(transcripts: Sequence[Transcript], task_id: str, alias: str) -> Iterator[Reason]:
    """Yield why the trajectories would not be grouped as attempts at the task."""
    runs = [one.trajectory for one in transcripts]
    for other in sorted({run.alias for run in runs} - {alias}):
        yield Reason("calls", f"the agent asked for {other!r}, and {alias!r} is what is trained", "use the given model")
    if any(run.task != task_id for run in runs):
        remedy = "give --store the proxy's store, or --proxy the proxy that uses this one"
        yield Reason("calls", "the proxy does not know the rollouts: it uses another store", remedy)


def _sampled(transcript: Transcript) -> tuple[bytes, ...]:
    return tuple(choice.token_ids for call in transcript.calls for choice in call.choices)


def of_judge(judge: Judge | None, transcript: Transcript | None) -> Iterator[Reason]:
    """Yield why a judge would teach nothing: it fails, or gives the same score whatever was answered."""
    if judge is None:
        yield Reason("judge", "no judge is named: nothing is trained", "give --judge module:function, or a YAML file")
        return
    if transcript is None:
        return
    answers = _answers(transcript)
    members = [_answered(transcript, answer, number) for number, answer in enumerate(answers)]
    if transcript.tools:
        tried = answers[_NOT_OF_THE_ROW:]
        members += [_by_tools(transcript, answer, len(answers) + number) for number, answer in enumerate(tried)]
    scores = {verdict.score for verdict in judge.judge(None, members).verdicts if verdict.score is not None}
    if len(scores) == 1:
        seen = f"{judge.name} gave {scores.pop():g} to what was answered, to nothing, and to every value of the row"
        yield Reason("judge", seen, "have it tell a right answer from a wrong one; `ratchet judge lint` tries harder")


def _answers(transcript: Transcript) -> list[Any]:
    """Return answers that a judge should tell apart: as it was, none, nonsense, and whatever the row holds."""
    row: Mapping[str, Any] = transcript.row or {}
    values = [value for value in row.values() if value not in (None, "")][:_VALUES_TRIED]
    return [None, "", "xyzzy", *(value if isinstance(value, str) else json.dumps(value) for value in values)]


def _answered(transcript: Transcript, answer: Any, number: int) -> Transcript:
    """Return the transcript with another answer and an id of its own; None leaves the answer."""
    run = msgspec.structs.replace(transcript.trajectory, id=f"{transcript.trajectory.id}-{number}")
    if answer is None:
        return msgspec.structs.replace(transcript, trajectory=run)
    returned = transcript.returned or WorkflowResult()
    said = None if returned.response is None else json.dumps(answer)
    return msgspec.structs.replace(
        transcript,
        trajectory=run,
        messages=(*transcript.messages[:-1], {"role": "assistant", "content": answer}),
        returned=msgspec.structs.replace(returned, response=said),
    )


def _by_tools(transcript: Transcript, answer: str, number: int) -> Transcript:
    """Return the transcript of an agent that gave the answer at once, as every text that any of its tools takes."""
    asked = [message for message in transcript.messages if message.get("role") in ("system", "developer", "user")]
    calls = [
        {"id": f"call_{place}", "type": "function", "function": {"name": name, "arguments": json.dumps(dict(given))}}
        for place, tool in enumerate(transcript.tools)
        if (name := _function(tool).get("name")) and (given := [(text, answer) for text in _texts(_function(tool))])
    ]
    said = (
        {"role": "assistant", "content": None, "tool_calls": calls} if calls else {"role": "assistant", "content": ""}
    )
    changed = _answered(transcript, answer, number)
    return msgspec.structs.replace(changed, messages=(*asked, said))


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a tool says of itself, in the dialect's own wrapping or without one."""
    inner = tool.get("function", tool)
    return inner if isinstance(inner, Mapping) else {}


def _texts(function: Mapping[str, Any]) -> list[str]:
    """Return the names of a function's parameters that are texts."""
    schema = function.get("parameters") or function.get("input_schema") or {}
    known = schema.get("properties") if isinstance(schema, Mapping) else None
    properties = known if isinstance(known, Mapping) else {}
    return [name for name, kind in properties.items() if isinstance(kind, Mapping) and kind.get("type") == "string"]


def of_scores(rollouts: Sequence[Rollout]) -> Iterator[Reason]:
    """Yield why the scores of the attempts would teach nothing."""
    failures = Counter(one.judge_failure for one in rollouts if one.judge_failure is not None)
    for failure, times in failures.most_common(3):
        if failure != NO_CALL:  # told already
            remedy = "mend the judge: a failure is never a score"
            yield Reason("judge", f"it failed on {times} of {len(rollouts)} attempts: {failure}", remedy)
    scores = [one.score for one in rollouts if one.score is not None]
    if len(scores) > 1 and max(scores) - min(scores) < _LEAST_SPREAD:
        seen = f"all {len(scores)} attempts scored {scores[0]:g}: a group without a difference teaches nothing"
        yield Reason(
            "scores", seen, "try another task, or more --attempts; see that tasks are neither sure nor hopeless"
        )


def of_settings(trainer: TrainerSettings, tuner: TunerSettings, seconds: float) -> Iterator[Reason]:
    """Yield why attempts that take so many seconds each would not become a group."""
    waits = trainer.num_generations / tuner.concurrency * seconds
    if waits > trainer.group_wait_seconds:
        seen = (
            f"{trainer.num_generations} attempts (trainer.num_generations) of {seconds:.0f} s, "
            f"{tuner.concurrency} at a time, "
            f"take {waits:.0f} s, and a group waits {trainer.group_wait_seconds:g} s"
        )
        yield Reason(
            "groups", seen, "raise --concurrency or trainer.group_wait_seconds, or lower trainer.num_generations"
        )
    if tuner.max_failures == 0:
        yield Reason("settings", "tuner.max_failures 0 stops at the first failed rollout", "raise it, or leave it out")
