"""Ctrl-C and SIGTERM at any moment: the first one stops everything cleanly, further ones do not break the stopping."""

from __future__ import annotations

import signal
from types import FrameType

INTERRUPTED = 130  # exit code after Ctrl-C
TERMINATED = 143  # exit code after SIGTERM


class Terminated(SystemExit):
    """SIGTERM arrived."""


def install() -> None:
    """From now on SIGINT raises KeyboardInterrupt, SIGTERM and SIGHUP raise Terminated, once. Main thread only."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _first)


def _first(number: int, _: FrameType | None) -> None:
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(TERMINATED)
