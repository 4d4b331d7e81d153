"""A run of the tuner while a process has it: no other goes on with it meanwhile, and how it ends is written down.

Promises: a second process that would go on with the run is refused, and told who has it and since when; one that died
is taken over from once its lease has expired; what ended a run is raised as it was, also where the store cannot be
told of it; a process that lost its run writes nothing more about it.
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

LEASE_PREFIX = "tuning:"  # what the names of the runs' leases begin with
_LEASE_SECONDS = 10.0  # a run is taken over this long after its process died


class RunLease:
    """This process's hold on a run, or on none yet."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lease: Lease | None = None

    def check(self) -> None:
        """Raise LeaseLost where another process goes on with the run."""
        if self._lease is not None:
            self._lease.check()

    @contextmanager
    def acquire(self, run: str, command: str | None = None, *, resume: bool = False) -> Iterator[Tuning]:
        """Have a run that was begun here, or go on with one. Raises LeaseTaken, InvalidTransition, RecordNotFound.

        `command` is what goes on with a run of this kind; None: nothing does.
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
    """Write down how a run ended where it did not end by itself; raise what ended it."""
    try:
        yield
    except BaseException as error:
        if _is_written(store, run, lease, error) and command is not None:
            click.echo(f"`{command} --resume {run}` goes on with it", err=True)
        raise


def _is_written(store: Store, run: str, lease: Lease, error: BaseException) -> bool:
    """Write down what ended a run, unless that is known (the trainer may have ended it); return whether it is ours."""
    from ratchet.store.errors import StoreError
    from ratchet.store.states import TuningState

    try:
        if not lease.confirmed():
            click.echo(f"another process goes on with {run}", err=True)
            return False
        if store.tunings.get(run).state is TuningState.RUNNING:
            stopped = not isinstance(error, Exception)  # Ctrl-C, or whoever listened went away
            told = None if stopped else f"{type(error).__name__}: {error}"
            store.tunings.end(run, TuningState.STOPPED if stopped else TuningState.FAILED, error=told)
    except StoreError as outage:
        click.echo(strip_control_characters(f"how {run} ended could not be written down: {outage}"), err=True)
    return True
