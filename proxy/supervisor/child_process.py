"""One process of a proxy with several workers, started by the supervisor, which it never outlives.

python -m ratchet.proxy.supervisor.child_process FD      (of its end of a pipe to the supervisor)
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import socket
import sys
import threading
from multiprocessing.connection import Connection

from ratchet.proxy.app import ProxyApplication
from ratchet.proxy.errors import ProxyError
from ratchet.proxy.server import run_process, tune_interpreter
from ratchet.proxy.supervisor.child_messages import Listening, SetAgents, Start, StartFailed, WorkerDied
from ratchet.proxy.telemetry import logs
from ratchet.store.errors import StoreError


def main(pipe: Connection) -> int:
    """Serve until a signal; return the exit status."""
    start: Start = pipe.recv()
    logs.configure_logging(start.settings.log_format, start.settings.log_level)

    received: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, received), name="supervisor", daemon=True).start()

    def on_started(app: ProxyApplication) -> None:
        tune_interpreter()
        loop = asyncio.get_running_loop()
        threading.Thread(target=_follow, args=(received, loop, app), name="messages", daemon=True).start()
        pipe.send(Listening())

    try:
        listeners = [socket.socket(fileno=number) for number in start.listeners]
        return run_process(start.settings, listeners, start.url, on_started, start.role)
    except (ProxyError, StoreError) as error:
        pipe.send(StartFailed(str(error)))
        return 1


def _receive(pipe: Connection, received: queue.SimpleQueue[object]) -> None:
    """Receive the supervisor's messages; end this process at once when the supervisor is gone, also while it starts."""
    while True:
        try:
            received.put(pipe.recv())
        except (EOFError, OSError):
            os.kill(os.getpid(), signal.SIGKILL)
            return


def _follow(received: queue.SimpleQueue[object], loop: asyncio.AbstractEventLoop, app: ProxyApplication) -> None:
    """Follow the supervisor's messages."""
    while True:
        message = received.get()
        if isinstance(message, SetAgents):
            loop.call_soon_threadsafe(app.set_agents, message.names)
        elif isinstance(message, WorkerDied):
            loop.call_soon_threadsafe(app.on_worker_died, message.name)


if __name__ == "__main__":
    sys.exit(main(Connection(int(sys.argv[1]))))
