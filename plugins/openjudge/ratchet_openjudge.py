"""The OpenJudge judge: a grader of py-openjudge in a process of its own, optionally in another environment.

The dependencies of py-openjudge conflict with other packages, therefore the separate process. The grader receives those
of its parameters that `arguments` knows, columns of the task's row, and constants. Its score is scaled to 0 to 1; a
score outside `worst` to `best` and any error of the grader or its process are failures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from ratchet.store.records import Transcript, Verdict
from ratchet.trainer.errors import JudgeError
from ratchet.trainer.judges.judgement import DraftVerdict, GroupJudgement, response_of, version_of
from ratchet.trainer.settings.judge_specs import JudgeSettings

_PROGRAM = Path(__file__).with_name("ratchet_openjudge_program.py")
_START_TIMEOUT = 120.0  # seconds, for the grader's imports
_REMEDY = "set `python` to an environment that has py-openjudge (plugins/openjudge/README.md)"


class OpenJudgeSettings(JudgeSettings):
    """A grader of OpenJudge, in its own process."""

    grader: str = Field(pattern=r"^[\w.]+:\w+$", description="the grader's class, as module:Class")
    settings: Mapping[str, Any] = Field(default_factory=dict, description="arguments of the grader's constructor")
    arguments: Mapping[str, Any] = Field(default_factory=dict, description="constant arguments of each evaluation")
    columns: Mapping[str, str] = Field(
        default_factory=dict, description="arguments read from columns of the task, by argument"
    )
    worst: float = Field(0.0, description="score of the grader that maps to 0")
    best: float = Field(1.0, description="score of the grader that maps to 1")
    python: Path | None = Field(
        None, description="Python interpreter of the environment with py-openjudge; null: this one"
    )
    api_key_env: str = Field(
        "RATCHET_JUDGE_API_KEY", pattern=r"^[A-Z][A-Z0-9_]*$", description="environment variable with the API key"
    )
    timeout_seconds: float = Field(120.0, gt=0, description="timeout of one group")

    @model_validator(mode="after")
    def _has_a_scale(self) -> OpenJudgeSettings:
        if self.worst == self.best:
            raise ValueError("worst and best are equal: every score would map to the same value")
        return self


class OpenJudgeJudge:
    """Sends the members of a group to one grader in one request. Raises JudgeError if it cannot be made."""

    concurrency = 1

    def __init__(
        self, settings: Mapping[str, Any], environ: Mapping[str, str], clock: Callable[[], float] = time.time
    ) -> None:
        self._spec = spec = OpenJudgeSettings.of_plugin("openjudge", settings)
        self._environ = environ
        self._clock = clock
        self.name = f"openjudge:{spec.grader.partition(':')[2]}"
        self._process: subprocess.Popen[bytes] | None = None
        grader = self._start()
        self._parameters = frozenset(grader["parameters"])
        self.version = version_of(spec.model_dump_json(exclude={"python", "timeout_seconds"}), grader["source"])

    def close(self) -> None:
        """End the grader's process."""
        process, self._process = self._process, None
        if process is not None and process.stdin and process.stdout:
            process.stdin.close()
            process.stdout.close()
            process.kill()
            process.wait()

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        """Return one verdict per member, in order."""
        started_at = time.perf_counter()
        opinions = self._opinions(members)
        latency = (time.perf_counter() - started_at) / max(1, len(members))
        return GroupJudgement(
            tuple(self._verdict(group_id, *pair, latency) for pair in zip(members, opinions, strict=True))
        )

    def _verdict(self, group_id: str | None, member: Transcript, opinion: DraftVerdict, latency: float) -> Verdict:
        return opinion.verdict(
            member, group_id, judge=self.name, version=self.version, cost=None, latency=latency,
            judged_at=self._clock(),
        )  # fmt: skip

    def _opinions(self, members: Sequence[Transcript]) -> list[DraftVerdict]:
        requests = [self._arguments(member) for member in members]
        complete = [one for one in requests if isinstance(one, dict)]
        try:
            if self._process is None:
                self._start()
            results = iter(
                self._exchange({"members": complete}, self._spec.timeout_seconds)["opinions"] if complete else ()
            )
        except JudgeError as error:
            results = iter([{"failure": str(error)}] * len(complete))
        return [self._scaled(next(results)) if isinstance(one, dict) else DraftVerdict.failed(one) for one in requests]

    def _arguments(self, member: Transcript) -> dict[str, Any] | str:
        """Return the grader's arguments for a trajectory, or the reason why they are incomplete."""
        offered = {name: value for name, value in arguments(member).items() if name in self._parameters}
        for name, column in self._spec.columns.items():
            if member.row is None or column not in member.row:
                return f"the task has no column {column!r}, which {name} is read from (ratchet tasks import)"
            offered[name] = member.row[column]
        return offered | dict(self._spec.arguments)

    def _scaled(self, result: Mapping[str, Any]) -> DraftVerdict:
        if "failure" in result:
            return DraftVerdict.failed(str(result["failure"]))
        low, high = sorted((self._spec.worst, self._spec.best))
        score = float(result["score"])
        if not low <= score <= high:
            return DraftVerdict.failed(
                f"the grader's score {score:g} is not between {low:g} and {high:g}: set worst and best"
            )
        return DraftVerdict.of(
            (score - self._spec.worst) / (self._spec.best - self._spec.worst), str(result["reason"])[:4000]
        )

    def _start(self) -> dict[str, Any]:
        """Start the grader's process; return its description of the grader. Raises JudgeError."""
        spec = self._spec
        python = str(spec.python or sys.executable)
        kept = {name: value for name, value in self._environ.items() if not name.startswith(("RATCHET_", "PYTHON"))}
        if key := self._environ.get(spec.api_key_env):
            kept["OPENAI_API_KEY"] = key
        try:
            self._process = subprocess.Popen(
                [python, str(_PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=kept, cwd=os.getcwd()
            )
        except OSError as error:
            raise JudgeError(f"judge openjudge: {python} cannot be run: {error.strerror}; set `python`") from error
        grader = self._exchange({"grader": spec.grader, "settings": dict(spec.settings)}, _START_TIMEOUT)
        problem = grader.get("problem") or self._unsupported(grader)
        if problem:
            self.close()
            missing = f"; {_REMEDY}" if "No module named 'openjudge" in problem else ""
            raise JudgeError(f"judge openjudge: {spec.grader}: {problem}{missing}")
        return grader

    def _unsupported(self, grader: Mapping[str, Any]) -> str | None:
        if grader["mode"] != "pointwise":
            return "it ranks groups and gives no scores; use kind: ruler for a ranking"
        available = {*KNOWN, *self._spec.columns, *self._spec.arguments}
        if missing := [name for name in grader["needed"] if name not in available]:
            return f"it needs {', '.join(missing)}: name a column of the task set (columns) or a constant (arguments)"
        return None

    def _exchange(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request to the process and return its response; kill it on timeout. Raises JudgeError."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        alarm = threading.Timer(seconds, process.kill)
        alarm.start()
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # the process has exited
            line = b""
        finally:
            alarm.cancel()
        if not line.endswith(b"\n"):  # no line, or an incomplete one
            self.close()
            raise JudgeError(f"the grader's process exited, or did not respond within {seconds:g} s; its log says why")
        response: dict[str, Any] = json.loads(line)
        return response


KNOWN = ("query", "response", "messages", "tool_definitions", "tool_calls", "task")


def arguments(member: Transcript) -> dict[str, Any]:
    """Return the data of a trajectory under the parameter names of OpenJudge's graders."""
    response = response_of(member)
    user_messages = [message for message in member.messages if message.get("role") == "user"]
    return {
        "query": _text(user_messages[-1].get("content")) if user_messages else "",
        "response": response if isinstance(response, str) else json.dumps(response),
        "messages": [dict(message) for message in member.messages],
        "tool_definitions": [dict(tool) for tool in member.tools],
        "tool_calls": [call for message in member.messages for call in message.get("tool_calls") or ()],
        "task": member.trajectory.task,
    }


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return str(content or "")
