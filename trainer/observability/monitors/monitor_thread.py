"""Monitoring: a thread that reads the store now and then and writes what is new to the monitors.

Promises: training neither waits for it nor fails by it. A monitor that raises is left out from then on, with an alarm
that names it and the reason; one that hangs is left behind at the end. What was written is remembered in the monitor's
folder, so that a restart goes on from there; a kill between writing and remembering writes some points twice.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ratchet.store.errors import StoreError
from ratchet.store.store import Store
from ratchet.trainer.errors import PluginError, SettingError
from ratchet.trainer.observability.monitors import Monitor
from ratchet.trainer.observability.monitors.points import Cursor, newer
from ratchet.trainer.user_code.plugins import MONITORS, load_plugin

log = logging.getLogger(__name__)

_EVERY = 2.0  # seconds between looks
_LAST_LOOK = 4.0  # seconds that the end of training waits for the last points
_CURSOR = "cursor.json"


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
