"""Monitors: plug-ins that draw what the store says of training, and the thread that writes to them.

A monitor is a projection of the store: it is fed with points, which are committed rounds and decisions about versions,
and with nothing else, so that it can be written again at any time (`ratchet status --tensorboard`). Training neither
waits for it nor fails by it: one that raises is left out from then on, with an alarm that names it and the reason; one
that hangs is left behind at the end. What was written is remembered in the monitor's folder, so that a restart goes on
from there; a kill between writing and remembering writes some points twice.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from ratchet.store.errors import StoreError
from ratchet.store.records import Decision, Round
from ratchet.store.states import RoundState
from ratchet.store.store import Store
from ratchet.trainer.errors import PluginError, SettingError
from ratchet.trainer.user_code import MONITORS, load_plugin

log = logging.getLogger(__name__)

_EVERY = 2.0  # seconds between looks
_LAST_LOOK = 4.0  # seconds that the end of training waits for the last points
_CURSOR = "cursor.json"
_MOST = 1000  # rounds or decisions of one look
_SETTINGS = "settings"
_MOST_VALUES = 200  # of one point: what others named can be many


@dataclass(frozen=True, slots=True)
class Point:
    """One thing that happened to a version: its round was committed, or something was decided about it.

    values  numbers by name, such as `round/reward`; a name's parts are separated by `/`
    note    one sentence, where there is more to say than numbers
    """

    version: int
    at: float  # Unix seconds
    values: Mapping[str, float]
    note: str | None = None


class Monitor(Protocol):
    """Something that points are written to."""

    def write(self, points: Sequence[Point]) -> None:
        """Write points, oldest first, so that they are there when this returns."""

    def close(self) -> None:
        """Nothing more is written."""


def open_monitor(name: str, folder: Path, alias: str) -> Monitor:
    """Return a monitor that writes into the folder. Raises PluginError if it cannot be imported."""
    monitor: Monitor = load_plugin(MONITORS, name)(folder, alias)
    return monitor


def check_installed(names: Iterable[str]) -> None:
    """Import the monitors. Raises SettingError if one is unknown or its package is missing."""
    for name in names:
        try:
            load_plugin(MONITORS, name)
        except PluginError as error:
            raise SettingError(f"trainer.report_to: {error}") from error


@contextmanager
def monitored(
    store: Store, alias: str, names: Iterable[str], folder: Path, last_look: float = _LAST_LOOK
) -> Iterator[None]:
    """Write to the monitors, each in a folder of its name, while the block runs.

    `last_look`: the most seconds that the end of the block waits for what is not written yet.
    """
    stop = threading.Event()
    threads = [
        threading.Thread(target=_follow, args=(store, alias, name, folder / name, stop), name=name, daemon=True)
        for name in names
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        deadline = time.monotonic() + last_look
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def replay(store: Store, alias: str, monitor: Monitor) -> int:
    """Write everything that the store holds to a monitor; return how many points."""
    cursor, count = Cursor(), 0
    while True:
        points, cursor_after = newer(store, alias, cursor)
        if cursor_after == cursor:
            return count
        monitor.write(points)
        cursor, count = cursor_after, count + len(points)


def _follow(store: Store, alias: str, name: str, folder: Path, stop: threading.Event) -> None:
    alarm = f"monitor:{name}:{alias}"
    try:
        monitor = open_monitor(name, folder, alias)
        store.alarms.clear(alarm)
        cursor = _read_cursor(folder)
        last = False
        while not last:
            last = stop.wait(_EVERY)
            cursor = _write_new_points(store, alias, monitor, folder, cursor)
        monitor.close()
    except Exception as error:  # noqa: BLE001 -- a plug-in may raise any exception and must not fail training
        reason = str(error) or type(error).__name__
        log.warning("event=monitor_failed monitor=%s reason=%r", name, reason)
        _raise_alarm(store, alarm, f"monitor {name} is left out until the next start: {reason}; its folder is {folder}")


def _write_new_points(store: Store, alias: str, monitor: Monitor, folder: Path, cursor: Cursor) -> Cursor:
    """Write the new points; if the store is unavailable, the next call tries again."""
    try:
        points, cursor_after = newer(store, alias, cursor)
    except StoreError as error:
        log.warning("event=monitor_without_store reason=%r", str(error))
        return cursor
    if cursor_after != cursor:
        monitor.write(points)
        _save_cursor(folder, cursor_after)
    return cursor_after


def _raise_alarm(store: Store, alarm: str, reason: str) -> None:
    try:
        store.alarms.raise_(alarm, reason)
    except StoreError as error:
        log.warning("event=alarm_not_raised alarm=%s reason=%r", alarm, str(error))


def _read_cursor(folder: Path) -> Cursor:
    try:
        return Cursor(**json.loads((folder / _CURSOR).read_text()))
    except FileNotFoundError:
        return Cursor()


def _save_cursor(folder: Path, cursor: Cursor) -> None:
    temporary = folder / f".{_CURSOR}"
    temporary.write_text(json.dumps({"round_id": cursor.round_id, "decision_id": cursor.decision_id}))
    temporary.replace(folder / _CURSOR)


# --- points from the store, oldest first


@dataclass(frozen=True, slots=True)
class Cursor:
    """What has been read: the last round that ended, and the last decision."""

    round_id: str = ""
    decision_id: int = 0


def newer(store: Store, alias: str, cursor: Cursor) -> tuple[list[Point], Cursor]:
    """Return the points after the cursor, oldest first, at most some thousands, and the cursor after them."""
    ended = _ended(store.rounds.rounds_after(alias, cursor.round_id, _MOST))
    decided = store.decisions.decisions_after(alias, cursor.decision_id, _MOST)
    points = [_round(one) for one in ended if one.state is RoundState.COMMITTED] + [_decision(one) for one in decided]
    return sorted(points, key=lambda point: point.at), Cursor(
        round_id=ended[-1].id if ended else cursor.round_id,
        decision_id=decided[-1].id if decided else cursor.decision_id,
    )


def _ended(rounds: Sequence[Round]) -> list[Round]:
    """Return the rounds before the first that is under way: that one is read when it has ended."""
    open_at = next((place for place, one in enumerate(rounds) if one.state is RoundState.STARTED), len(rounds))
    return list(rounds[:open_at])


def _round(one: Round) -> Point:
    values = _numbers_of({key: value for key, value in one.metrics.items() if key != "untrained_tokens"}, "round")
    left_out = one.metrics.get("untrained_tokens") or {}
    values |= _numbers_of(left_out, "untrained_tokens")
    if trajectories := values.get("round/trajectories"):
        sampled = values.get("round/tokens_trained", 0.0) + sum(left_out.values())
        values["round/tokens_per_trajectory"] = sampled / trajectories
    return Point(one.to_version or 0, one.ended_at or one.started_at, values)


def _decision(one: Decision) -> Point:
    note = f"{one.alias}@{one.version}: {one.action} by {one.decided_by}: {one.reason}"
    return Point(one.version, one.decided_at, _numbers_of(one.evidence, "decision"), note)


def _numbers_of(content: Mapping[str, Any], name: str) -> dict[str, float]:
    return dict(islice(_numbers(content, name), _MOST_VALUES))


def _numbers(content: Mapping[str, Any], name: str) -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of nested mappings by their path."""
    for key, value in content.items():
        path = f"{name}/{str(key).replace('/', '_')}"
        if key == _SETTINGS:  # they do not change with the version
            continue
        if isinstance(value, Mapping):
            yield from _numbers(value, path)
        elif isinstance(value, int | float) and math.isfinite(value):
            yield path, float(value)
