"""Agents come and go without a restart: watch the settings file that a service was started with.

The file is read again when it has changed; Kubernetes replaces a mounted ConfigMap by a link, which counts. Only
`agents` is applied. Other keys that changed are named in the log, for they need a restart, and a file that cannot be
used is reported and changes nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ratchet.errors import CliError
from ratchet.settings.project_settings import Settings

log = logging.getLogger("ratchet.settings")

_POLL_SECONDS = 2.0
_APPLIED = frozenset({"agents", "model"})
_Stamp = tuple[int, int, int] | None  # of a file: modification time, size, inode


def with_agents_of(running: Settings, new: Settings) -> Settings:
    """Return the running settings with the agents of new ones. Raises SettingsError if they do not fit together."""
    return running.changed(agents=new.given_in("agents"), model=new.model)


def changed_agents(running: Settings, new: Settings) -> tuple[list[str], list[str], list[str]]:
    """Return the names of agents that are new, that left, and whose settings changed."""
    before, after = running.agents_by_name, new.agents_by_name
    changed = [name for name in after if name in before and after[name] != before[name]]
    return [n for n in after if n not in before], [n for n in before if n not in after], changed


def keys_for_restart(running: Settings, new: Settings) -> list[str]:
    """Return the keys that differ and are not applied while a service runs."""
    before, after = (dict(_flat(one.model_dump(mode="json", exclude=set(_APPLIED)))) for one in (running, new))
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))


def _flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


class AgentsWatch:
    """Watches a settings file. `apply` gets the running settings with other agents, in the watch's thread."""

    def __init__(
        self,
        file: Path,
        running: Settings,
        read: Callable[[], Settings],
        apply: Callable[[Settings], object],
        poll_seconds: float = _POLL_SECONDS,
    ) -> None:
        """`read` reads the settings as the service did at its start."""
        self._file = file
        self._running = running
        self._read = read
        self._apply = apply
        self._poll_seconds = poll_seconds
        self._seen = _stamp(file)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="agents-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._poll_seconds):
            self.look()

    def look(self) -> None:
        """Read the file if it has changed, and apply its agents."""
        stamp = _stamp(self._file)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._update(self._read())
        except (CliError, ValueError) as error:
            log.error("event=settings_refused file=%s reason=%r", self._file, str(error))

    def _update(self, new: Settings) -> None:
        if keys := keys_for_restart(self._running, new):
            log.warning("event=settings_need_restart file=%s keys=%s", self._file, ",".join(keys))
        changed = with_agents_of(self._running, new)
        joined, left, other = changed_agents(self._running, changed)
        if joined or left or other:
            self._apply(changed)
            log.info("event=agents_reloaded joined=%s left=%s changed=%s", joined, left, other)
        self._running = changed


def _stamp(file: Path) -> _Stamp:
    """Return what changes with a file; None while there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
