"""The lease of a tuning run: one process at a time runs it, and the way it ended is stored.

Guarantees: a second process that tries to resume the run is refused, with the owner and the time in the message; the
run of a dead process can be resumed after its lease expires; an error that ends a run is raised unchanged, even if the
store is unreachable; a process that lost the lease writes nothing more about the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from ratchet.output.terminal import strip_control_characters

if TYPE_CHECKING:
    from ratchet.store.records.tuning import Tuning
    from ratchet.store.store import Store
    from ratchet.trainer.lease import Lease

LEASE_PREFIX = "tuning:"  # prefix of lease names
_LEASE_SECONDS = 10.0  # a run can be resumed this long after its process died


class RunLease:
    """The lease on at most one run."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lease: Lease | None = None

    def check(self) -> None:
        """Raise LeaseLost if another process has the run."""
        if self._lease is not None:
            self._lease.check()

    @contextmanager
    def acquire(self, run: str, command: str | None = None, *, resume: bool = False) -> Iterator[Tuning]:
        """Acquire the lease of a run, and resume it if asked. Raises LeaseTaken, InvalidTransition, RecordNotFound.

        `command`: the command that resumes runs of this kind; None: they cannot be resumed.
        """
        from ratchet.trainer.lease import Lease

        self._store.tunings.get(run)
        with Lease(self._store, f"{LEASE_PREFIX}{run}", _LEASE_SECONDS) as lease:
            lease.claim(lambda waits: click.echo(waits, err=True))
            self._lease = lease
            with _ending(self._store, run, lease, command):
                yield self._store.tunings.resume(run) if resume else self._store.tunings.get(run)


@contextmanager
def _ending(store: Store, run: str, lease: Lease, command: str | None) -> Iterator[None]:
    """Store how an unfinished run ended; raise the error unchanged."""
    try:
        yield
    except BaseException as error:
        if _store_end(store, run, lease, error) and command is not None:
            click.echo(f"`{command} --resume {run}` resumes it", err=True)
        raise


def _store_end(store: Store, run: str, lease: Lease, error: BaseException) -> bool:
    """Store the error of a run unless it has ended; return whether this process still owns the run."""
    from ratchet.store.errors import StoreError
    from ratchet.store.states import TuningState

    try:
        if not lease.confirmed():
            click.echo(f"another process resumed {run}", err=True)
            return False
        if store.tunings.get(run).state is TuningState.RUNNING:
            stopped = not isinstance(error, Exception)  # Ctrl-C or a closed pipe
            message = None if stopped else f"{type(error).__name__}: {error}"
            store.tunings.end(run, TuningState.STOPPED if stopped else TuningState.FAILED, error=message)
    except StoreError as outage:
        click.echo(strip_control_characters(f"the end of {run} could not be stored: {outage}"), err=True)
    return True
