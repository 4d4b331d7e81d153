"""The judge that is a Python function, named as `module:function`.

The function may name any of these parameters and gets those that it names:

    trajectory  {"id", "task", "messages", "tools", "calls", "version"}; messages are OpenAI chat messages
    response    text of the last assistant message ("" where it has none)
    task        the task key that the agent sent, or None

It returns a number or bool, or {"score", "components", "explanation"}. An exception, a missing score, or one that is
not a finite number is a judge failure. The function is the user's own code and runs with the trainer's rights.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import math
import numbers
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from store.records import Transcript, Verdict
from trainer.errors import JudgeError

PARAMETERS = ("trajectory", "response", "task")


class FunctionJudge:
    """A judge made of one Python function."""

    def __init__(self, entry_point: str, clock: Callable[[], float] = time.time) -> None:
        self._function, self._named, source = _load(entry_point)
        self._clock = clock
        self.name = entry_point
        self.version = hashlib.sha256(f"{entry_point}\0{source}".encode()).hexdigest()[:16]

    def judge(self, group_id: str, members: Sequence[Transcript]) -> list[Verdict]:
        """Return one verdict per member, in order."""
        return [self._verdict(group_id, member) for member in members]

    def _verdict(self, group_id: str, transcript: Transcript) -> Verdict:
        began = time.perf_counter()
        score, failure, components, explanation = self._ask(transcript)
        return Verdict(
            trajectory_id=transcript.trajectory.id,
            group_id=group_id,
            judge=self.name,
            judge_version=self.version,
            score=score,
            failure=failure,
            explanation=explanation,
            components=components,
            cost=0.0,
            latency=time.perf_counter() - began,
            judged_at=self._clock(),
        )

    def _ask(self, transcript: Transcript) -> tuple[float | None, str | None, Mapping[str, float], str]:
        offered = arguments(transcript)
        try:
            return _read(self._function(**{name: offered[name] for name in self._named}))
        except Exception as error:  # noqa: BLE001  whatever a user's judge raises or returns is a failed verdict
            return None, f"{type(error).__name__}: {error}", {}, ""


def arguments(transcript: Transcript) -> dict[str, Any]:
    """Return everything that a judge function may ask for, by parameter name."""
    run = transcript.trajectory
    none: Mapping[str, Any] = {}
    last = next((m for m in reversed(transcript.messages) if m.get("role") == "assistant"), none)
    content = last.get("content")
    return {
        "trajectory": {
            "id": run.id,
            "task": run.task,
            "version": run.version,
            "calls": len(transcript.calls),
            "messages": [dict(message) for message in transcript.messages],
            "tools": [dict(tool) for tool in transcript.tools],
        },
        "response": content if isinstance(content, str) else "",
        "task": run.task,
    }


def _load(entry_point: str) -> tuple[Callable[..., Any], tuple[str, ...], str]:
    """Import the function; return it, the parameters that it names and its module's source text."""
    module_name, _, function_name = entry_point.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # the `ratchet` script does not put the working folder on the path; `python -m` does
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name)
    except Exception as error:  # the user's module may fail in any way while it is imported
        problem = f"{type(error).__name__}: {error}"
        raise JudgeError(
            f"judge {entry_point}: {problem}; give it as module:function, importable from {here}"
        ) from error
    if not callable(function):
        raise JudgeError(f"judge {entry_point} is not a function")
    named = tuple(inspect.signature(function).parameters)
    unknown = [name for name in named if name not in PARAMETERS]
    if unknown or not named:
        raise JudgeError(
            f"judge {entry_point} takes {', '.join(named) or 'nothing'}; it may take {', '.join(PARAMETERS)}"
        )
    return function, named, inspect.getsource(module)


def _read(answer: Any) -> tuple[float | None, str | None, Mapping[str, float], str]:
    """Return (score, failure, components, explanation) of what a judge function returned."""
    parts = answer if isinstance(answer, Mapping) else {"score": answer}
    score = parts.get("score")
    components = parts.get("components") or {}
    if not isinstance(score, numbers.Real) or not math.isfinite(score):
        return None, f"the judge returned {answer!r:.200}, which holds no finite score", {}, ""
    named = {str(name): value for name, value in components.items()}
    if not all(isinstance(v, numbers.Real) and math.isfinite(v) for v in named.values()):
        return None, f"the judge returned components that are not finite numbers: {components!r:.200}", {}, ""
    return float(score), None, {name: float(v) for name, v in named.items()}, str(parts.get("explanation") or "")
