"""Runs in the environment that has py-openjudge: one grader, asked line by line.

    python openjudge_program.py            standard input and output, one JSON value a line

The first line is {"grader": "module:Class", "settings": {...}}; it is answered with {"parameters", "needed", "mode",
"source"} or {"problem"}. Each further line is {"members": [arguments, ...]}, answered with {"opinions": [{"score",
"reason"} or {"failure"}, ...]} in order, the members being graded at once. What a grader counts as its own trouble is a
failure here, never its number. Imports nothing of Ratchet; ends with its input.
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
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what graders print is no answer
    sys.path[0] = os.getcwd()  # the user's own graders, and nothing of this folder
    with asyncio.Runner() as runner:
        grader: Any = None
        for line in sys.stdin:
            asked = json.loads(line)
            if grader is None:
                grader, answer = begin(asked)
            else:
                answer = {"opinions": runner.run(opinions(grader, asked["members"]))}
            said.write(json.dumps(answer) + "\n")
            said.flush()


def begin(asked: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Make the grader; return it with what it takes, or None with the problem."""
    module, _, name = asked["grader"].partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
        grader = kind(**(cautious(kind) | asked["settings"]))
        named = inspect.signature(grader._aevaluate).parameters.values()
        plain = [one for one in named if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        return grader, {
            "parameters": [one.name for one in plain],
            "needed": [one.name for one in plain if one.default is one.empty],
            "mode": str(getattr(grader.mode, "value", grader.mode)),
            "source": hashlib.sha256(inspect.getsource(sys.modules[kind.__module__]).encode()).hexdigest(),
        }
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- whatever keeps a foreign grader from being made is the answer
        return None, {"problem": f"{type(error).__name__}: {error}"}


def cautious(kind: Any) -> dict[str, Any]:
    """Return settings under which a grader that breaks off gives no score; some give a full one by default."""
    return {"timeout_score": math.nan} if "timeout_score" in inspect.signature(kind).parameters else {}


async def opinions(grader: Any, members: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the grader says of each member."""
    return list(await asyncio.gather(*(opinion(grader, member) for member in members)))


async def opinion(grader: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a score with its reason, or a failure."""
    try:
        found = await grader.aevaluate(**arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- whatever a foreign grader raises is a failed verdict
        return {"failure": f"{type(error).__name__}: {error}"}
    score, reason = getattr(found, "score", None), str(getattr(found, "reason", "") or "")
    trouble = getattr(found, "error", None) or (getattr(found, "metadata", None) or {}).get("error")
    if trouble or not isinstance(score, int | float) or not math.isfinite(score):
        return {"failure": f"{trouble or 'no finite score'}: {reason}"}
    return {"score": float(score), "reason": reason}


if __name__ == "__main__":
    main()
