"""Who runs a method of the tuner: a command, or Python with functions of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ratchet.errors import RunCancelled

Function = Callable[..., Any]
_COMMANDS = {
    "eval": "ratchet eval", "select-model": "ratchet tune select-model", "prompt": "ratchet tune prompt",
    "weights": "ratchet tune weights",
}  # fmt: skip
_FUNCTIONS = {
    "eval": "ratchet.evaluate", "select-model": "ratchet.select_model", "prompt": "ratchet.tune_prompt",
    "weights": "ratchet.tune", "gather": "ratchet.gather",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunCaller:
    """The caller of a run; the default is a command.

    workflow   a function in place of the settings' workflow
    judge      a function in place of the settings' judge
    families   functions that are the workflows of task families
    cancelled  set to stop the run before its next rollout, and those in progress
    started    called with the run's id once it has begun
    """

    workflow: Function | None = None
    judge: Function | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    started: Callable[[str], object] = lambda run: None
    in_python: bool = False
    families: Mapping[str, Function] = field(default_factory=dict)

    def check(self) -> None:
        """Raise RunCancelled if the run was cancelled."""
        if self.cancelled.is_set():
            raise RunCancelled("the run was cancelled")

    def resumption(self, kind: str, run: str) -> str | None:
        """Return the command or call that resumes a run; None if runs of this kind cannot be resumed."""
        if kind not in (_FUNCTIONS if self.in_python else _COMMANDS):
            return None
        return f"{_FUNCTIONS[kind]}(resume={run!r}, ...)" if self.in_python else f"{_COMMANDS[kind]} --resume {run}"


COMMAND = RunCaller()
