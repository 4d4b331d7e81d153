"""Stores forked prompts in blocks, so that an agent that re-renders its context each turn needs linear space.

A forked prompt repeats nearly all of an earlier prompt, but does not begin with its parent's whole sequence. It is cut
into blocks of 256 tokens. Each block is stored once per trajectory, by its hash; the call keeps the hashes and the
tokens after the last full block. Blocks are deleted with their trajectory.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.verbs import chunks
from ratchet.store.errors import RecordDamaged

_BLOCK = 256 * 4  # bytes of int32 ids
_DIGEST = 16


def split_prompt(context: str, prompt_ids: bytes) -> tuple[tuple[bytes, ...], bytes]:
    """Return (full blocks, rest) of a call's prompt; only forks are cut."""
    if context != "fork":
        return (), prompt_ids
    end = len(prompt_ids) - len(prompt_ids) % _BLOCK
    return tuple(prompt_ids[at : at + _BLOCK] for at in range(0, end, _BLOCK)), prompt_ids[end:]


def digest(block: bytes) -> bytes:
    """Return the hash of a block."""
    return blake2b(block, digest_size=_DIGEST).digest()


def block_digests(named: bytes | None) -> list[bytes]:
    """Return the hashes of a call's blocks, in order."""
    return [named[at : at + _DIGEST] for at in range(0, len(named), _DIGEST)] if named else []


class Blocks:
    """The blocks of some calls, loaded together."""

    def __init__(self, connection: sa.Connection, rows: Iterable[Any]) -> None:
        wanted = {(row.trajectory_id, name) for row in rows for name in block_digests(row.prompt_blocks)}
        table = schema.prompt_blocks
        self._ids: dict[tuple[str, bytes], bytes] = {}
        trajectories = sorted({run for run, _ in wanted})
        for names in chunks(trajectories):
            for row in connection.execute(sa.select(table).where(table.c.trajectory_id.in_(names))):
                if (row.trajectory_id, row.digest) in wanted:
                    self._ids[row.trajectory_id, row.digest] = row.token_ids

    def full_prompt(self, row: Any) -> bytes:
        """Return the whole prompt of a call. Raises RecordDamaged if a block is missing."""
        if not row.prompt_blocks:
            ids: bytes = row.prompt_ids
            return ids
        try:
            blocks = [self._ids[row.trajectory_id, name] for name in block_digests(row.prompt_blocks)]
        except KeyError as error:
            raise RecordDamaged(f"a block of the prompt of call {row.id} is missing") from error
        return b"".join([*blocks, row.prompt_ids])
