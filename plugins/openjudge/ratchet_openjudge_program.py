"""Serves one OpenJudge grader over standard input and output; runs in the environment of py-openjudge.

    python ratchet_openjudge_program.py    one JSON value per line

The first request is {"grader": "module:Class", "settings": {...}}, the response {"parameters", "needed", "mode",
"source"} or {"problem"}. Further requests are {"members": [arguments, ...]}, the responses {"opinions": [{"score",
"reason"} or {"failure"}, ...]} in order; members are graded concurrently. Errors that a grader reports are failures,
never scores. Imports nothing of Ratchet; exits at the end of its input.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import inspect
import json
import math
import os
import sys
from typing import Any


def main() -> None:
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # graders may print to standard output
    sys.path[0] = os.getcwd()  # import the user's graders, not this folder's modules
    with asyncio.Runner() as runner:
        grader: Any = None
        for line in sys.stdin:
            request = json.loads(line)
            if grader is None:
                grader, response = create_grader(request)
            else:
                response = {"opinions": runner.run(opinions(grader, request["members"]))}
            output.write(json.dumps(response) + "\n")
            output.flush()


def create_grader(request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Create the grader; return it with its description, or None with the problem."""
    module, _, name = request["grader"].partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
        grader = kind(**(timeout_settings(kind) | request["settings"]))
        parameters = inspect.signature(grader._aevaluate).parameters.values()
        named = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        return grader, {
            "parameters": [one.name for one in named],
            "needed": [one.name for one in named if one.default is one.empty],
            "mode": str(getattr(grader.mode, "value", grader.mode)),
            "source": hashlib.sha256(inspect.getsource(sys.modules[kind.__module__]).encode()).hexdigest(),
        }
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- a grader's constructor may raise any exception
        return None, {"problem": f"{type(error).__name__}: {error}"}


def timeout_settings(kind: Any) -> dict[str, Any]:
    """Return settings that give no score on timeout; some graders give a full one by default."""
    return {"timeout_score": math.nan} if "timeout_score" in inspect.signature(kind).parameters else {}


async def opinions(grader: Any, members: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the grader's result for each member."""
    return list(await asyncio.gather(*(opinion(grader, member) for member in members)))


async def opinion(grader: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a score with its reason, or a failure."""
    try:
        result = await grader.aevaluate(**arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- a grader may raise any exception
        return {"failure": f"{type(error).__name__}: {error}"}
    score, reason = getattr(result, "score", None), str(getattr(result, "reason", "") or "")
    error_text = getattr(result, "error", None) or (getattr(result, "metadata", None) or {}).get("error")
    if error_text or not isinstance(score, int | float) or not math.isfinite(score):
        return {"failure": f"{error_text or 'no finite score'}: {reason}"}
    return {"score": float(score), "reason": reason}


if __name__ == "__main__":
    main()
