"""A TCP relay between two processes: it can be cut, and it can hold what the server sends."""

from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    """Relays connections at `url` to a port of this machine, until `stop`. `to` says which, before the first one."""

    def __init__(self) -> None:
        self._port = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._state = threading.Condition()
        self._is_cut = False
        self._left: int | None = None  # chunks of the server that pass; None: all
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def to(self, port: int) -> str:
        """Relay to a port; return `url`."""
        self._port = port
        return self.url

    def cut(self) -> None:
        """Close every connection, and new ones at once."""
        with self._state:
            self._is_cut = True
            for one in self._open:
                _shut(one)

    def mend(self, answers: int | None = None) -> None:
        """Relay again; `answers`: hold what the server sends after so many chunks."""
        with self._state:
            self._is_cut, self._left = False, answers
            self._state.notify_all()

    def stop(self) -> None:
        """Close everything."""
        _shut(self._listener)
        self.mend()
        self.cut()
        for thread in self._threads:
            thread.join(60)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._relay, args=(client,), daemon=True))
                self._threads[-1].start()

    def _relay(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port)) as server:
            with self._state:
                if self._is_cut:
                    return
                self._open |= {client, server}
            requests = threading.Thread(target=self._copy, args=(client, server, False), daemon=True)
            requests.start()
            self._copy(server, client, True)
            requests.join()
            with self._state:
                self._open -= {client, server}

    def _copy(self, source: socket.socket, target: socket.socket, holds: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                if holds:
                    self._wait_for_turn()
                target.sendall(data)
        for one in (source, target):
            _shut(one)

    def _wait_for_turn(self) -> None:
        with self._state:
            while self._left == 0:
                self._state.wait()
            if self._left is not None:
                self._left -= 1


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
