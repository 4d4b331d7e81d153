"""The list of vLLM replicas, and the credentials in their URLs."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

# User names and passwords in URLs: removes them for display, and extracts them for requests. Pure.
#
# Guarantee: the displayed form contains nothing before the last `@`, even if the URL is malformed.

_USERINFO = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*://)?.*@", re.DOTALL)


def without_credentials(url: str) -> str:
    """Return a URL without user name and password."""
    return _USERINFO.sub(r"\g<1>", url) if "@" in url else url


def credentials(url: str) -> tuple[str, str] | None:
    """Return the decoded user name and password in a URL, or None. Raises ValueError for a malformed URL."""
    parts = urlsplit(url)
    if parts.username is None:
        return None
    return unquote(parts.username), unquote(parts.password or "")


def http_url(url: str) -> str:
    """Return a server's URL. Raises ValueError, whose message contains no password.

    Port 0 is valid: the operating system chooses a port.
    """
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port >= 0)
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(
            f"{without_credentials(url)!r} is not an http(s) URL; write it like http://127.0.0.1:8001, and what is "
            "special in a name or password before its host with percent signs"
        )
    return url


def plain_url(url: str) -> str:
    """Return a server's URL without a final `/v1`. Raises ValueError as `http_url` does."""
    return http_url(url).rstrip("/").removesuffix("/v1")


# The replicas of vLLM as a list that may change while it runs. Controller and proxy read it with the same code.
#
# An entry is one of
#
#     http://10.0.0.5:8000            one server
#     dns+http://vllm-headless:8000   every address that the name has, such as a headless service of Kubernetes
#     file:replicas.txt               a file with one URL per line, read again when it changes; # begins a comment
#
# Pure functions but for `resolve`. A list that cannot be read, or is empty, leaves the replicas as they were.

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
