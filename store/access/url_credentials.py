"""User names and passwords in URLs: removes them for display, and extracts them for requests. Pure.

Guarantee: the displayed form contains nothing before the last `@`, even if the URL is malformed.
"""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

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
