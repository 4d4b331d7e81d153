"""Addresses of servers in the trainer's settings: http(s), kept without a `/v1` at their end."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator


def plain_url(url: str) -> str:
    """Return a server's address without `/v1`. Raises ValueError."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not an http(s) URL, such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


PlainUrl = Annotated[str, AfterValidator(plain_url)]
