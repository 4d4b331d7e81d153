"""The replicas of vLLM as a list that may change while it runs. Controller and proxy read it with the same code.

An entry is one of

    http://10.0.0.5:8000            one server
    dns+http://vllm-headless:8000   every address that the name has, such as a headless service of Kubernetes
    file:replicas.txt               a file with one URL per line, read again when it changes; # begins a comment

Pure functions but for `resolve`. A list that cannot be read, or is empty, leaves the replicas as they were.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from ratchet.store.access.url_credentials import plain_url, without_credentials

_DNS = "dns+"
_FILE = "file:"

Lookup = Callable[[str, int], Sequence[str]]  # addresses of a name


def check_entry(entry: str) -> str:
    """Return an entry in its plain form, without /v1. Raises ValueError, whose message contains no password."""
    if entry.startswith(_FILE):
        if not entry.removeprefix(_FILE).strip():
            raise ValueError("file: names no file; write it like file:replicas.txt")
        return entry
    if entry.startswith(_DNS):
        return _DNS + plain_url(entry.removeprefix(_DNS))
    try:
        return plain_url(entry)
    except ValueError as error:
        raise ValueError(f"{error}; dns+http://NAME:PORT and file:PATH are lists that are read again") from error


def look_up(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a name. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(entry[4][0]) for entry in found})


class ReplicaList:
    """The URLs of the replicas, from entries. `problem` says why the last reading failed; None if it did not."""

    def __init__(self, entries: Sequence[str], lookup: Lookup = look_up) -> None:
        self._entries = tuple(map(check_entry, entries))
        self._lookup = lookup
        self._known: dict[str, tuple[str, ...]] = {}  # by entry
        self.problem: str | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether the list never changes."""
        return not any(entry.startswith((_DNS, _FILE)) for entry in self._entries)

    def resolve(self) -> tuple[str, ...]:
        """Return the URLs, each once. May wait for the name server."""
        self.problem = None
        for entry in self._entries:
            try:
                found = self._read(entry)
            except (OSError, ValueError) as error:
                self.problem = f"{without_credentials(entry)} cannot be read: {error}"
                continue
            if found:
                self._known[entry] = found
            else:
                self.problem = f"{without_credentials(entry)} names no replica"
        return tuple(dict.fromkeys(url for entry in self._entries for url in self._known.get(entry, ())))

    def _read(self, entry: str) -> tuple[str, ...]:
        if entry.startswith(_FILE):
            lines = Path(entry.removeprefix(_FILE)).read_text().splitlines()
            return tuple(plain_url(url) for line in lines if (url := line.partition("#")[0].strip()))
        if not entry.startswith(_DNS):
            return (entry,)
        parts = urlsplit(entry.removeprefix(_DNS))
        port = parts.port or (443 if parts.scheme == "https" else 80)
        userinfo, at, _ = parts.netloc.rpartition("@")
        return tuple(
            urlunsplit((parts.scheme, f"{userinfo}{at}{_host(address)}:{port}", parts.path, "", ""))
            for address in self._lookup(parts.hostname or "", port)
        )


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
