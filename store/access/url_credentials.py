"""URLs that hold a user's name and password: what may be shown of them, and the pair that a server is sent.

Promises: what is shown holds nothing of what stands before the last `@`, whatever the URL looks like. Pure.
"""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

_USERINFO = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*://)?.*@", re.DOTALL)


def without_credentials(url: str) -> str:
    """Return a URL without name and password; without any it comes back as it is."""
    return _USERINFO.sub(r"\g<1>", url) if "@" in url else url


def credentials(url: str) -> tuple[str, str] | None:
    """Return the name and password in a URL, decoded; None if it has none. Raises ValueError where it is none."""
    parts = urlsplit(url)
    if parts.username is None:
        return None
    return unquote(parts.username), unquote(parts.password or "")


def plain_url(url: str) -> str:
    """Return a server's address as it is used: without `/v1` at its end. Raises ValueError, which shows no password.

    Port 0 is fine: it stands for one that is still to be chosen.
    """
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port >= 0)
    except ValueError:
        fine = False
    if not fine:
        raise ValueError(
            f"{without_credentials(url)!r} is not an http(s) URL; write it like http://127.0.0.1:8001, and what is "
            "special in a name or password before its host with percent signs"
        )
    return url.rstrip("/").removesuffix("/v1")
