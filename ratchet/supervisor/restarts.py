"""Keeps started rooms up: one that died is started again, after a pause that grows, a bounded number of times.

Promises: the other rooms are left alone meanwhile; each death is told at once, with the end of the room's log, and is
an alarm in the store until the room is back; a room that dies more often than `most` times within `WINDOW` is given up.
Without its trainer a project goes on serving and recording, and says so; without vLLM or the proxy it ends
(ServiceExited).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ratchet.errors import ServiceExited
from ratchet.settings.state_folder import StateFolder
from ratchet.supervisor import signals
from ratchet.supervisor.events import Event
from ratchet.supervisor.service_process import ServiceProcess

WINDOW = 600.0  # seconds in which deaths are counted
_LONGEST_PAUSE = 30.0  # seconds
_DISPENSABLE = ("trainer",)

RaiseAlarm = Callable[[str, str | None], None]  # room, reason; None: the alarm is over


class RestartBackoff:
    """How often one room died. Pure; `now` is monotonic seconds."""

    def __init__(self, most: int) -> None:
        self.count = 0
        self._most = most
        self._at: deque[float] = deque()

    def died(self, now: float) -> float | None:
        """Take note of a death; return the pause in seconds before it is started again, None to give it up."""
        self.count += 1
        self._at.append(now)
        while now - self._at[0] > WINDOW:
            self._at.popleft()
        if len(self._at) > self._most:
            return None
        return float(min(_LONGEST_PAUSE, 2 ** (len(self._at) - 1)))


@dataclass(slots=True)
class _ManagedService:
    """A room under upkeep: it runs and is ready, or is starting, or starts again at `again_at`, or was given up."""

    deaths: RestartBackoff
    starting: bool = False
    again_at: float | None = None
    given_up: bool = False
    reason: str = ""


class RestartManager:
    """The upkeep of `children`, in which a room that is started again takes the place of the one that died."""

    def __init__(
        self,
        children: list[ServiceProcess],
        state: StateFolder,
        most: int,
        on_event: Callable[[Event], None],
        alarm: RaiseAlarm,
    ) -> None:
        self._children = children
        self._state = state
        self._most = most
        self._on_event = on_event
        self._alarm = alarm
        self._kept = {child.room.name: _ManagedService(RestartBackoff(most)) for child in children}

    def deaths(self) -> dict[str, dict[str, Any]]:
        """Return, by room that died, how often, why last, and whether it was given up."""
        return {
            name: {"count": kept.deaths.count, "reason": kept.reason, "given_up": kept.given_up}
            for name, kept in self._kept.items()
            if kept.deaths.count
        }

    def turn(self, now: float) -> bool:
        """Do what is due; return whether a room died or was started. Raises ServiceExited."""
        changed = [self._look(place, now) for place in range(len(self._children))]
        return any(changed)

    def _look(self, place: int, now: float) -> bool:
        child = self._children[place]
        kept = self._kept[child.room.name]
        if kept.given_up:
            return False
        if kept.again_at is not None:
            return now >= kept.again_at and self._start(place, kept)
        if child.exit_code is not None:
            return self._died(child, kept, child.ending(), now)
        return kept.starting and self._wait(child, kept, now)

    def _start(self, place: int, kept: _ManagedService) -> bool:
        room = self._children[place].room
        with signals.defer_signals():  # a child that was started is a child that will be stopped
            self._children[place] = ServiceProcess(room, self._state)
        kept.starting, kept.again_at = True, None
        return True

    def _wait(self, child: ServiceProcess, kept: _ManagedService, now: float) -> bool:
        """Look whether a room that was started again is ready; one that takes too long is ended, as if it had died."""
        seconds = now - child.started_at
        if child.room.ready():
            kept.starting = False
            self._on_event(Event("back", child.room.name, seconds=seconds))
            self._alarm(child.room.name, None)
            return True
        if seconds < child.room.start_timeout_seconds:
            return False
        child.finish_stop(time.monotonic() + child.room.grace)
        return self._died(child, kept, f"was not ready within {child.room.start_timeout_seconds:.0f} s", now)

    def _died(self, child: ServiceProcess, kept: _ManagedService, ending: str, now: float) -> bool:
        child.finish_stop(time.monotonic() + child.room.grace)
        name, pause = child.room.name, kept.deaths.died(now)
        kept.reason = f"{name} (pid {child.pid}) {ending}"
        log = f"Its log is {child.log}; it ends with:\n{child.tail()}"
        if pause is not None:
            kept.again_at = now + pause
            self._on_event(Event("died", name, text=f"{kept.reason}; it is started again in {pause:.0f} s. {log}"))
            self._alarm(name, f"{kept.reason}; `ratchet up` starts it again, and this is cleared once it is ready")
            return True
        kept.given_up = True
        if name not in _DISPENSABLE:
            raise ServiceExited(f"{self._too_often(kept)}; the others are being stopped. {log}")
        self._tell(
            name,
            f"{self._too_often(kept)}; it is not started again: agents are served and recorded, nothing is trained "
            "until `ratchet down` and `ratchet up`",
            log,
        )
        return True

    def _too_often(self, kept: _ManagedService) -> str:
        if not self._most:
            return kept.reason
        return f"{kept.reason}; it has died {self._most + 1} times within {WINDOW / 60:.0f} minutes (restarts)"

    def _tell(self, name: str, what: str, log: str) -> None:
        self._on_event(Event("died", name, text=f"{what}. {log}"))
        self._alarm(name, what)
