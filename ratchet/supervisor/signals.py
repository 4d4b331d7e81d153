"""Ctrl-C and SIGTERM at any moment: the first one stops everything cleanly, later ones do not interrupt the stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # exit code after Ctrl-C
TERMINATED = 143  # exit code after SIGTERM
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(SystemExit):
    """SIGTERM arrived."""


def install_handlers() -> None:
    """Make SIGINT raise KeyboardInterrupt, and SIGTERM and SIGHUP raise Terminated, once. Main thread only."""
    for number in _SIGNALS:
        signal.signal(number, _raise_once)


def _raise_once(number: int, _: FrameType | None) -> None:
    for other in _SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(TERMINATED)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer signals until the end of the block. Child processes inherit the blocked mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def ignore_signals() -> Iterator[None]:
    """Ignore signals in the block: for stopping, which is what a signal asks for.

    Does nothing outside the main thread, where no signal handler runs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
