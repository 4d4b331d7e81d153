"""Runs one proxy until a signal stops it; `ratchet proxy` calls `serve`.

SIGTERM, SIGINT and SIGHUP make the proxy unready, close the listener (after `drain_delay_seconds`), let open calls end
(`drain_timeout_seconds`), then write, ship and close. A second signal skips the delay; a third, SIGINT, skips
everything. If a background task dies (`critical_tasks.py`), the proxy stops the same way a moment later, with status 1.
The port is bound first, so a busy port is an error with a remedy.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from ratchet.proxy.app import ProxyApplication, create_app
from ratchet.proxy.coordinator.shipping.writer_process import WriterProcess
from ratchet.proxy.errors import ProxyError
from ratchet.proxy.roles import CoordinatorRole, Role
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.runtime.malloc import return_large_blocks
from ratchet.proxy.settings import ProxySettings
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.proxy.worker.http.connections import ClientConnection, ClientConnections
from ratchet.proxy.worker.http.repeated_posts import RepeatedPosts
from ratchet.proxy.worker.http.routing import Lifespan
from ratchet.proxy.worker.http.tls_certificate import TlsCertificate
from ratchet.store.access.replicas import ReplicaList
from ratchet.store.store import open_store

log = logging.getLogger("ratchet.proxy")

SetAgents = Callable[[Sequence[str]], object]

# A full garbage collection stalls every call for tens of milliseconds: run it rarely (54 -> 6 us per call). A
# collection of new objects takes 0.7 ms with this threshold.
_GC_THRESHOLDS = (2_000, 25, 200)
_FAILED_SECONDS = 2.0  # how long /health/live reports the death of a task
_EXIT_SECONDS = 2.0  # for the end of the interpreter
_SHUTDOWN_SECONDS = 30.0  # for the shutdown after that, beyond the time for open calls
_RESERVED_FILES = 256  # listener, journal, store, libraries


def serve(
    settings: ProxySettings,
    on_listening: Callable[[str], None] | None = None,
    follow_agents: Callable[[SetAgents], None] | None = None,
) -> int:
    """Serve until a signal; return the exit status. `on_listening` gets the URL when the proxy accepts calls.

    `follow_agents` then gets a function that sets the names of the agents; any thread may call it.

    The status is 1 if a background task died; the log names it.

    Raises ProxyError (port, journal, certificate) and store.errors.StoreError (database), with the remedy.
    """
    with listen(settings.host, settings.port) as listener:
        url = url_of(settings.host, listener, tls=settings.tls_certificate is not None)
        return run_process(settings, [listener], url, lambda app: _started(app, url, on_listening, follow_agents))


def run_process(
    settings: ProxySettings,
    listeners: Sequence[socket.socket],
    url: str,
    on_started: Callable[[ProxyApplication], None],
    role: Role | None = None,
) -> int:
    """Serve until a signal; return the exit status.

    Args:
        listeners: the port, with TLS if it is set, and further ones without.
        url: where agents reach the proxy.

    Raises ProxyError and store.errors.StoreError with the remedy in the message.
    """
    return_large_blocks()
    certificate = TlsCertificate(settings.tls_certificate, settings.tls_key) if settings.tls_certificate else None
    store = open_store(settings.store)
    key = settings.upstream_key.get_secret_value() if settings.upstream_key else None
    upstream = Upstream(
        ReplicaList(settings.upstreams).resolve(),
        settings.request_timeout_seconds,
        key,
        settings.stream_idle_timeout_seconds,
    )
    store_writer = WriterProcess(settings.store, settings.log_format, settings.log_level)
    critical_tasks = CriticalTasks()
    app = create_app(settings, store, upstream, url, store_writer, critical_tasks, role)
    connections = ClientConnections(
        settings.max_connections, settings.read_timeout_seconds, settings.write_timeout_seconds
    )
    protocol: Any = RepeatedPosts if isinstance(role, CoordinatorRole) else ClientConnection
    server = _Server(
        uvicorn.Config(
            app,
            loop="uvloop",
            http=partial(protocol, connections),  # type: ignore[arg-type]
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # `create_app` reads them, from `trusted_proxies`
            server_header=False,
            timeout_keep_alive=75,  # longer than clients keep idle connections
            timeout_graceful_shutdown=int(settings.drain_timeout_seconds) + 1,
            backlog=2048,
        ),
        app,
        connections,
        critical_tasks,
        lambda: on_started(app),
        settings.drain_delay_seconds,
        certificate,
    )
    _raise_file_limit(2 * settings.max_connections + _RESERVED_FILES)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns about every malformed request
    handlers = {number: signal.signal(number, _ignore) for number in (signal.SIGINT, signal.SIGTERM)}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        handlers[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda _, at: server.handle_exit(signal.SIGTERM, at))
    try:
        server.run(sockets=list(listeners))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        store.close()
    status = 0 if critical_tasks.failure is None else 1
    if status:
        log.critical("event=failed url=%s reason=%r", url, critical_tasks.failure)
    else:
        log.info("event=stopped url=%s", url)
    _exit_after(_EXIT_SECONDS, status)  # the interpreter would wait for threads that a hanging store does not answer
    return status


def _exit_after(seconds: float, status: int) -> None:
    """End the process by force if it still runs then."""
    last = threading.Timer(seconds, os._exit, [status])
    last.daemon = True
    last.start()


class _Server(uvicorn.Server):
    """uvicorn's server with a callback when it serves, and an error that says why it cannot."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: Lifespan,
        connections: ClientConnections,
        critical_tasks: CriticalTasks,
        on_started: Callable[[], None],
        drain_delay_seconds: float,
        certificate: TlsCertificate | None,
    ) -> None:
        self._exits = asyncio.Event()
        super().__init__(config)
        self._certificate = certificate
        if certificate is not None:
            config.load()
            config.ssl = certificate.context
        self._lifespan = app
        self._connections = connections
        self._critical_tasks = critical_tasks
        self._on_started = on_started
        self._drain_delay = drain_delay_seconds
        self._stopping = False

    @property
    def should_exit(self) -> bool:
        """Whether the server stops."""
        return self._should_exit

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        self._should_exit = value
        if value and self.started:
            self._loop.call_soon_threadsafe(self._exits.set)

    async def main_loop(self) -> None:
        """Serve until `should_exit`; uvicorn's own loop wakes ten times a second."""
        counter = 0
        while not await self.on_tick(counter):
            counter += 10  # of these ticks, once a second
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exits.wait(), 1.0)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Become unready at once and stop after `drain_delay_seconds`; a second signal skips the delay."""
        self._lifespan.on_stop()
        if self._stopping or not self._drain_delay or not self.started:
            super().handle_exit(sig, frame)
            return
        self._stopping = True
        log.info("event=stopping delay=%g", self._drain_delay)
        self._loop.call_soon_threadsafe(self._loop.call_later, self._drain_delay, super().handle_exit, sig, frame)

    def _fail(self) -> None:
        """A task died: become unready, shut down in a moment, and exit by force if that hangs."""
        self._lifespan.on_stop()
        self._loop.call_soon_threadsafe(self._loop.call_later, _FAILED_SECONDS, self._request_exit)
        _exit_after(_FAILED_SECONDS + (self.config.timeout_graceful_shutdown or 0) + _SHUTDOWN_SECONDS, status=1)

    def _request_exit(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await self._critical_tasks.stop_tasks(*self._watches)

    def _make_protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(self.config, self.server_state, self.lifespan.state)
        return protocol

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._critical_tasks.on_failure = self._fail
        try:
            await super().startup(sockets[:1] if sockets else None)
            for own in sockets[1:] if sockets else ():
                self.servers.append(await self._loop.create_server(self._make_protocol, sock=own))
        except SystemExit:  # uvicorn's way to report a failed start
            raise ProxyError(f"the proxy could not start: {self._lifespan.failure or 'see its log'}") from None
        if self.started:
            start = self._critical_tasks.start_task
            self._watches = [start(self._connections.close_slow(), "slow-connection check")]
            if self._certificate is not None:
                self._watches.append(start(self._certificate.watch(), "certificate"))
            self._on_started()


def _started(
    app: ProxyApplication,
    url: str,
    on_listening: Callable[[str], None] | None,
    follow_agents: Callable[[SetAgents], None] | None,
) -> None:
    tune_interpreter()
    log.info("event=listening url=%s", url)
    if on_listening is not None:
        on_listening(url)
    if follow_agents is not None:
        loop = asyncio.get_running_loop()
        follow_agents(lambda names: loop.call_soon_threadsafe(app.set_agents, names))


def tune_interpreter() -> None:
    """Collect garbage rarely, and let the event loop run soon while other threads work; call it once all is loaded."""
    gc.collect()
    sys.setswitchinterval(0.0005)  # the loop gets the interpreter back quickly while the shipper works
    gc.set_threshold(*_GC_THRESHOLDS)
    gc.freeze()  # imported objects stay: collections need not visit them


def _raise_file_limit(wanted: int) -> None:
    """Raise the limit of open files towards `wanted`: a call uses two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft not in (resource.RLIM_INFINITY, limit) and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < wanted:
        log.warning(
            "event=few_files limit=%d wanted=%d remedy='raise ulimit -n or lower max_connections'", limit, wanted
        )


def listen(host: str, port: int) -> socket.socket:
    """Bind the port. Raises ProxyError if it is busy or the host is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ProxyError(
            f"port {port} on {host} cannot be used: {error}; choose another --port, or 0 for any free one"
        ) from error
    listener.set_inheritable(True)
    return listener


def url_of(host: str, listener: socket.socket, *, tls: bool = False) -> str:
    """Return the URL of a listener."""
    scheme, port = "https" if tls else "http", listener.getsockname()[1]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _ignore(number: int, frame: FrameType | None) -> None:
    """Ignore the signal that uvicorn raises again after its graceful stop."""
