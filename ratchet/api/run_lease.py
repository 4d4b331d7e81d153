"""Who runs a method of the tuner, and the lease of the run: one process at a time runs it, and how it ended is stored.

Guarantees: a second process that tries to resume the run is refused, with the owner and the time in the message; the
run of a dead process can be resumed after its lease expires; an error that ends a run is raised unchanged, even if the
store is unreachable; a process that lost the lease writes nothing more about the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ratchet.errors import RunCancelled
from ratchet.output import print_note
from ratchet.store.errors import StoreError
from ratchet.store.states import RELEASE_EVALUATION, TuningState
from ratchet.trainer.lease import Lease

if TYPE_CHECKING:
    from ratchet.store.operation_records import Tuning
    from ratchet.store.store import Store

Function = Callable[..., Any]
_LEASE_SECONDS = 10.0  # a run can be resumed this long after its process died
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
    """The caller of a run: a command by default, or Python with functions of its own.

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
        if self.cancelled.is_set():
            raise RunCancelled("the run was cancelled")

    @property
    def stop(self) -> Callable[[], None] | None:
        """What is called while services start, and raises to stop that; None: a signal stops a command."""
        return self.check if self.in_python else None

    def resumption(self, kind: str, run: str) -> str | None:
        """Return the command or call that resumes a run; None if runs of this kind cannot be resumed."""
        if kind not in (_FUNCTIONS if self.in_python else _COMMANDS):
            return None
        return f"{_FUNCTIONS[kind]}(resume={run!r}, ...)" if self.in_python else f"{_COMMANDS[kind]} --resume {run}"


COMMAND = RunCaller()


class RunLease:
    """The lease on at most one run."""

    def __init__(self, store: Store, caller: RunCaller = COMMAND) -> None:
        self._store = store
        self._caller = caller
        self._lease: Lease | None = None

    def check(self) -> None:
        """Raise TrainerError if another process has the run, RunCancelled if the caller cancelled it."""
        if self._lease is not None:
            self._lease.check()
        self._caller.check()

    def resumption(self, run: Tuning) -> str | None:
        """Return the command or call that resumes a run; None if there is none."""
        return self._caller.resumption(run.kind, run.id)

    @contextmanager
    def acquire(self, run: str, *, resume: bool = False, resumable: bool = True) -> Iterator[Tuning]:
        """Acquire the lease of a run, and resume it if asked. Raises TrainerError, InvalidTransition, RecordNotFound.

        `resumable`: say how to resume it if it ends early.
        """
        from ratchet.store.tuning import RUN_LEASE

        found = self._store.tunings.get(run)
        resumption = self.resumption(found) if resumable else None
        with Lease(self._store, f"{RUN_LEASE}{run}", _LEASE_SECONDS) as lease:
            lease.claim(print_note)
            self._lease = lease
            try:
                tuning = self._store.tunings.resume(run) if resume else self._store.tunings.get(run)
                self._caller.started(run)
                yield tuning
            except BaseException as error:
                if self._store_end(run, lease, error) and resumption is not None:
                    print_note(f"`{resumption}` resumes it")
                raise

    def _store_end(self, run: str, lease: Lease, error: BaseException) -> bool:
        """Store the error of a run unless it has ended; return whether this process still owns the run."""
        tunings = self._store.tunings
        try:
            if not lease.confirmed():
                print_note(f"another process resumed {run}")
                return False
            if tunings.get(run).state is TuningState.RUNNING:
                stopped = isinstance(error, RunCancelled) or not isinstance(error, Exception)  # Ctrl-C, a closed pipe
                message = None if stopped else f"{type(error).__name__}: {error}"
                tunings.end(run, TuningState.STOPPED if stopped else TuningState.FAILED, error=message)
        except StoreError as outage:
            print_note(f"the end of {run} could not be stored: {outage}")
        return True


def interruption(run: Tuning, led: Container[str]) -> str | None:
    """Return that a run was interrupted, because its process is gone, and how to go on; else None.

    `led`: the runs that a process runs, `store.tunings.led()`.
    """
    if run.state is not TuningState.RUNNING or run.id in led or run.config.get(RELEASE_EVALUATION):
        return None
    if run.config.get("run_judge"):
        return (
            "interrupted: its process is gone, and its rollouts wait for its judge; run the cell again with "
            f"resume={run.id!r}"
        )
    called = COMMAND.resumption(run.kind, run.id) or RunCaller(in_python=True).resumption(run.kind, run.id)
    return "interrupted: its process is gone" + (f"; `{called}` resumes it" if called else "")
