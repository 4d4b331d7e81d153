"""What the supervisor tells while it starts, keeps and stops the rooms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Event:
    """What the supervisor does: `seconds` since the start of the room, or of the whole."""

    kind: Literal["note", "starting", "waiting", "ready", "all_ready", "died", "back", "stopping", "stopped"]
    room: str = ""
    text: str = ""
    seconds: float = 0.0


def ignore(_: Event) -> None:
    """Tell nobody."""
