"""Under which names a key may have a trajectory that its client names: the name itself, or one that is the key's own.

A name that another key's trajectory has leads to `NAME~HASH`, with a hash of the key's id, also after a restart. Who
knows that id can begin a trajectory of that name, too; then the third name is taken, which nobody can work out who does
not know this process' secret, and which is another one after a restart.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from hashlib import blake2b

_SECRET = secrets.token_bytes(16)
_LONGEST = 128  # characters of a trajectory's id in the store


def names(name: str, key_id: str | None) -> Iterator[str]:
    """Yield the names in the order in which they are tried."""
    key = str(key_id).encode()
    yield name
    yield _with(name, blake2b(key, digest_size=4).hexdigest())
    yield _with(name, blake2b(key, digest_size=8, key=_SECRET).hexdigest())


def _with(name: str, suffix: str) -> str:
    whole = f"{name}~{suffix}"
    if len(whole) <= _LONGEST:
        return whole
    return f"{blake2b(name.encode(), digest_size=16).hexdigest()}~{suffix}"
