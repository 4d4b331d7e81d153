"""Ctrl-C and SIGTERM at any moment: the first one stops everything cleanly, further ones do not break the stopping."""

from __future__ import annotations

import signal
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
def held_back() -> Iterator[None]:
    """Let no signal come between the lines of the block; it arrives after them. Children inherit this."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
