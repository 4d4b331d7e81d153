"""API keys: their form, their hash, and the environment variables that hold them."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets

KEYS_VARIABLE = "RATCHET_API_KEYS"


OPERATOR_KEYS_VARIABLE = "RATCHET_OPERATOR_KEYS"


def hash_key(key: bytes) -> str:
    """Return the SHA-256 of an API key as hex; its first 16 characters are the key's id in records."""
    return hashlib.sha256(key).hexdigest()


def is_loopback(host: str) -> bool:
    """Return whether a host name or address without brackets is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


PREFIX = "rk-"  # by which a leaked key is recognised


def new_key() -> str:
    """Return a new key: the prefix and 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)
