"""Ctrl-C and SIGTERM at any moment: the first one stops everything cleanly, further ones do not break the stopping."""

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


def install() -> None:
    """From now on SIGINT raises KeyboardInterrupt, SIGTERM and SIGHUP raise Terminated, once. Main thread only."""
    for number in _SIGNALS:
        signal.signal(number, _first)


def _first(number: int, _: FrameType | None) -> None:
    for other in _SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(TERMINATED)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Let no signal come between the lines of the block; it arrives after them. Children inherit this."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def ignored() -> Iterator[None]:
    """Let no signal break the block: for stopping, which is what a signal would ask for. Outside the main thread, where
    no signal is raised, nothing changes.
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
