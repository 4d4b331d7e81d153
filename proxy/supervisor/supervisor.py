"""Runs a proxy with several workers: N processes that serve one port, and the coordinator that places their calls.

Workers of several machines may share a coordinator: then this proxy runs one for all of them, or none.
The supervisor serves nothing. It binds the port, so no connection is refused while a process restarts, and starts the
processes again when they die. SIGTERM, SIGINT and SIGHUP stop the workers as `server.py` describes, then the
coordinator; a second signal skips the delay, a third SIGINT skips everything. SIGUSR2 restarts the workers one after
another: each ends its calls while the others serve. If the supervisor is killed, all processes end.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from hashlib import blake2b
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

import ratchet
from ratchet.proxy import server
from ratchet.proxy.errors import ProxyError
from ratchet.proxy.roles import CoordinatorRole, Role, WorkerRole, session_name
from ratchet.proxy.settings import ProxySettings, listen_address
from ratchet.proxy.supervisor.child_messages import Listening, SetAgents, Start, StartFailed, WorkerDied
from ratchet.store.store import open_store

log = logging.getLogger("ratchet.proxy")

COORDINATOR = "coordinator"
_ROOT = Path(ratchet.__file__).parents[1]
_MAX_BACKOFF_SECONDS = 5.0  # between two starts of a process that dies
_FIRST_BACKOFF_SECONDS = 0.1
_STABLE_SECONDS = 30.0  # a process that ran this long is started again at once
_SHUTDOWN_SECONDS = 30.0  # beyond the time for open calls
_LOOPBACK = "127.0.0.1"


def serve(
    settings: ProxySettings,
    on_listening: Callable[[str], None] | None = None,
    follow_agents: Callable[[server.SetAgents], None] | None = None,
) -> int:
    """Serve until a signal, in this process or with several workers; return the exit status.

    The arguments and errors are those of `server.serve`.
    """
    if settings.is_one_process:
        return server.serve(settings, on_listening, follow_agents)
    settings.check_token()
    open_store(settings.store).close()  # creates it once
    with ExitStack() as stack:
        names = [f"worker-{number}" for number in range(1, settings.workers + 1)]
        public = stack.enter_context(server.listen(settings.host, settings.port)) if names else None
        own = {name: stack.enter_context(server.listen(_LOOPBACK, 0)) for name in names}
        if settings.has_own_coordinator:
            address = listen_address(settings.coordinator_listen) if settings.coordinator_listen else (_LOOPBACK, 0)
            own[COORDINATOR] = stack.enter_context(server.listen(*address))
        supervisor = WorkerSupervisor(settings, public, own)
        return supervisor.run(on_listening, follow_agents)


class _Child:
    """One process: how it is started, and its state."""

    def __init__(self, name: str, start: Start) -> None:
        self.name = name
        self.start = start
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe: Connection | None = None
        self.is_listening = False
        self.is_restarting = False
        self.started_at = 0.0  # monotonic seconds
        self.backoff = 0.0
        self.restart_at: float | None = None  # monotonic seconds; None: it runs, or shall not run

    def spawn(self, hash_seed: str) -> None:
        """Start the process."""
        self.pipe, theirs = Pipe()
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ratchet.proxy.supervisor.child_process", str(theirs.fileno())],
            pass_fds=(theirs.fileno(), *self.start.listeners),
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": hash_seed},
            process_group=0,  # the terminal's signals reach the supervisor only
        )
        theirs.close()
        log.info("event=process_started name=%s pid=%d", self.name, self.process.pid)
        self.started_at, self.restart_at = time.monotonic(), None
        self.is_listening = self.is_restarting = False
        self.send(self.start)

    def send(self, message: Any) -> None:
        """Send a message, unless the process is gone."""
        try:
            if self.pipe is not None:
                self.pipe.send(message)
        except OSError as error:
            log.debug("event=process_gone name=%s reason=%r", self.name, str(error))

    def signal(self, number: int) -> None:
        """Send a signal, unless the process is gone."""
        if self.process is not None:
            self.process.send_signal(number)

    def clean_up(self) -> int:
        """Wait for the process, which has ended or is killed here; return its status."""
        assert self.process is not None
        assert self.pipe is not None
        try:
            status = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self.pipe.close()
        self.process = self.pipe = None
        return status


class WorkerSupervisor:
    """The processes of one proxy. `own`: each process's own listener, by its name. `public`: None without workers."""

    def __init__(self, settings: ProxySettings, public: socket.socket | None, own: Mapping[str, socket.socket]) -> None:
        urls = {name: server.url_of(_reachable(listener), listener) for name, listener in own.items()}
        if public is None:
            self.url = urls[COORDINATOR]
        else:
            self.url = server.url_of(settings.host, public, tls=settings.tls_certificate is not None)
        self._settings = settings
        self._public = public
        given = settings.coordinator_token
        token = given.get_secret_value() if given is not None else secrets.token_urlsafe(32)
        self._hash_seed = str(_hash_seed(token))
        group = None if given is None else _digest(token, "group")
        machine = f"{socket.gethostname()[:60]}-{_digest(str(settings.journal.absolute()), 'machine')}"
        owner = f"{machine}-{secrets.token_hex(4)}" if settings.coordinator else None  # others may stand by
        workers = {name: url for name, url in urls.items() if name != COORDINATOR}
        own_url = urls.get(COORDINATOR)
        coordinators = settings.coordinator or (urls[COORDINATOR],)
        self._children: dict[str, _Child] = {}
        for name, listener in own.items():
            others = {other: url for other, url in workers.items() if other != name}
            role: Role = WorkerRole(name, machine, coordinators, token, others, own_url)
            listeners = [one.fileno() for one in (public, listener) if one is not None]
            changed: dict[str, Any] = {"journal": settings.journal / name}
            if name == COORDINATOR:
                role, listeners = CoordinatorRole(machine, workers, token, group, owner), [listener.fileno()]
                changed = {"tls_certificate": None, "tls_key": None, "trusted_proxies": (), "allowed_origins": ()}
                if workers:  # it stops after them, when no client sends calls to this proxy
                    changed["drain_delay_seconds"] = 0.0
            start = Start(settings.model_copy(update=changed), role, listeners, "" if public is None else self.url)
            self._children[name] = _Child(name, start)
        self._machine = machine
        self._agents: Sequence[str] | None = None
        self._lock = threading.Lock()  # guards pipes, which the agents' thread writes to
        self._signals = 0  # that ask to stop
        self._force = False
        self._to_restart: list[str] = []  # workers, one after another
        self._failure: str | None = None

    def run(
        self,
        on_listening: Callable[[str], None] | None,
        follow_agents: Callable[[server.SetAgents], None] | None,
    ) -> int:
        """Run until a signal; return the exit status. Raises ProxyError if a process cannot start."""
        with _Wakeups(self._on_signal) as wakeups:
            try:
                for child in self._children.values():
                    child.spawn(self._hash_seed)
                self._watch(wakeups.reader, lambda: self._started or bool(self._failure))
                if self._started and not self._signals:
                    log.info("event=listening url=%s workers=%d", self.url, self._settings.workers)
                    if on_listening is not None:
                        on_listening(self.url)
                    if follow_agents is not None:
                        follow_agents(self._set_agents)
                    self._watch(wakeups.reader, lambda: False)
            finally:
                self._stop(wakeups.reader)
        if self._failure is not None:
            raise ProxyError(self._failure)
        log.info("event=stopped url=%s", self.url)
        return 0

    @property
    def _started(self) -> bool:
        return all(child.is_listening for child in self._children.values())

    def _watch(self, wakeups: Connection, is_done: Callable[[], bool]) -> None:
        """Restart processes and read their messages until a signal to stop, or `is_done`."""
        while not self._signals and not is_done():
            self._restart_next()
            self._read_pipes(wakeups, self._until_restart())
            for child in self._children.values():
                if child.restart_at is not None and child.restart_at <= time.monotonic():
                    with self._lock:
                        child.spawn(self._hash_seed)

    def _until_restart(self) -> float | None:
        waits = [child.restart_at for child in self._children.values() if child.restart_at is not None]
        return max(0.0, min(waits) - time.monotonic()) if waits else None

    def _read_pipes(self, wakeups: Connection, timeout: float | None) -> None:
        by_pipe = {child.pipe: child for child in self._children.values() if child.pipe is not None}
        for ready in wait([*by_pipe, wakeups], timeout):
            if ready is wakeups:
                os.read(wakeups.fileno(), 4096)
                continue
            child = by_pipe[ready]  # type: ignore[index]
            try:
                self._on_message(child, child.pipe.recv() if child.pipe is not None else None)
            except (EOFError, OSError):
                self._on_end(child)

    def _on_message(self, child: _Child, message: Any) -> None:
        if isinstance(message, Listening):
            child.is_listening = True
            if isinstance(child.start.role, WorkerRole):
                child.start = replace(child.start, role=child.start.role._replace(is_restarted=True))
            if self._agents is not None:
                child.send(SetAgents(self._agents))
        elif isinstance(message, StartFailed):
            log.error("event=process_failed name=%s reason=%r", child.name, message.reason)
            if not child.backoff:  # at the first start; a later one is tried again
                self._failure = self._failure or message.reason

    def _on_end(self, child: _Child) -> None:
        with self._lock:
            status = child.clean_up()
        lived = time.monotonic() - child.started_at
        child.is_listening = False
        if child.name != COORDINATOR and COORDINATOR in self._children:
            self._children[COORDINATOR].send(WorkerDied(session_name(self._machine, child.name)))
        if self._signals:
            return
        if child.is_restarting:
            child.backoff, child.restart_at = _FIRST_BACKOFF_SECONDS, time.monotonic()
            return
        child.backoff = min(max(child.backoff * 2, _FIRST_BACKOFF_SECONDS), _MAX_BACKOFF_SECONDS)
        if lived > _STABLE_SECONDS:
            child.backoff = _FIRST_BACKOFF_SECONDS
        child.restart_at = time.monotonic() + child.backoff
        log.error("event=process_died name=%s status=%d restart_seconds=%.1f", child.name, status, child.backoff)

    def _restart_next(self) -> None:
        """Restart the next worker that SIGUSR2 asked for, if all processes serve."""
        if self._to_restart and self._started:
            child = self._children[self._to_restart.pop(0)]
            log.info("event=restarting name=%s", child.name)
            child.is_listening, child.is_restarting = False, True
            child.signal(signal.SIGTERM)

    def _set_agents(self, names: Sequence[str]) -> None:
        with self._lock:
            self._agents = tuple(names)
            for child in self._children.values():
                if child.is_listening:
                    child.send(SetAgents(self._agents))

    def _stop(self, wakeups: Connection) -> None:
        """Stop the workers, then the coordinator."""
        if self._public is not None:
            self._public.close()  # else connections would wait there after the workers have closed theirs
        self._signals = max(1, self._signals)
        grace = self._settings.drain_delay_seconds + self._settings.drain_timeout_seconds + _SHUTDOWN_SECONDS
        workers = [child for child in self._children.values() if child.name != COORDINATOR]
        for group in (workers, [child for child in self._children.values() if child.name == COORDINATOR]):
            sent, until = 0, time.monotonic() + grace
            while alive := [child for child in group if child.process is not None]:
                if sent < self._signals:
                    sent = self._signals
                    for child in alive:
                        child.signal(signal.SIGTERM)
                if self._force or time.monotonic() > until:
                    for child in alive:
                        child.signal(signal.SIGKILL)
                self._read_pipes(wakeups, 1.0)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGUSR2:
            self._to_restart = [name for name in self._children if name != COORDINATOR]
            return
        self._signals += 1
        self._force = self._force or (number == signal.SIGINT and self._signals > 2)


def _reachable(listener: socket.socket) -> str:
    """Return an address of a listener that this machine reaches."""
    host: str = listener.getsockname()[0]
    return {"0.0.0.0": _LOOPBACK, "::": "::1"}.get(host, host)


def _digest(text: str, purpose: str) -> str:
    return blake2b(text.encode(), digest_size=6, person=purpose.encode()).hexdigest()


def _hash_seed(token: str) -> int:
    """Return the seed of Python's hashes of texts, which the processes compare: those with one token have the same."""
    return 1 + int.from_bytes(blake2b(token.encode(), digest_size=8, person=b"hash seed").digest()) % (2**32 - 1)


class _Wakeups:
    """Handles the supervisor's signals; each one makes `reader` readable."""

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self.reader, self._writer = Pipe(duplex=False)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Wakeups:
        os.set_blocking(self._writer.fileno(), False)
        self._fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            numbers.append(signal.SIGHUP)
        for number in numbers:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd)
        self.reader.close()
        self._writer.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._on_signal(number)
