"""Addresses: how a server that listens somewhere is written in a URL that can be asked from this machine."""

from __future__ import annotations


def url(host: str, port: int) -> str:
    """Return the URL at which a server that listens on `host:port` can be asked from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
