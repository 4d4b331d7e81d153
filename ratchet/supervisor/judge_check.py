"""Whether the trainer could make its judge: asked before anything starts, in a process of its own.

Promises: the user's code is imported with the trainer's environment, never into the process that holds the rooms; a
judge that cannot be made is told in one sentence. What the judge would say is `ratchet judge try`'s to tell.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from ratchet.errors import SettingsError
from ratchet.settings import Settings

_PATIENCE = 120.0  # seconds; a judge's own imports may be large
_PROGRAM = """
import json, os, sys
from trainer.errors import TrainerError
from ratchet.trainer.controller.judges.make_judge import make_judge
from ratchet.trainer.settings.judge_specs import read_spec
try:
    make_judge(read_spec(json.load(sys.stdin)), os.environ).close()
except TrainerError as error:
    sys.exit("ratchet: " + str(error))
"""


def check_judge(settings: Settings, environ: Mapping[str, str]) -> None:
    """Raise SettingsError where the judge that is named cannot be made."""
    spec = settings.trainer_settings(base_model=settings.base_model or "unset").judge.model_dump_json()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM], input=spec, capture_output=True, text=True, timeout=_PATIENCE,
            env=dict(environ), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        raise SettingsError(f"trainer.judge: it was not made within {_PATIENCE:g} s: what does it import?") from late
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SettingsError(f"trainer.judge: {last.removeprefix('ratchet: ')}")
