"""Compares the processes of a learner before they load anything: version of Ratchet and files of the base model.

Each process publishes what it is in the launcher's key-value store; process 0 compares, and all of them end with one
error if one differs. Torch is imported by `compare_processes`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

from ratchet.trainer.errors import LearnerRefused, WorkerProcessLost

_TIMEOUT = timedelta(minutes=30)  # digests of a large base model on a slow disk
_PREFIX = "ratchet/identity"


@dataclass(frozen=True, slots=True)
class LearnerProcessIdentity:
    """What must be the same in all processes of a learner; `host` is where this one runs."""

    host: str
    version: str
    base_model: str
    digests: Mapping[str, str]


def difference(first: LearnerProcessIdentity, other: LearnerProcessIdentity) -> str | None:
    """Return how a process differs from process 0; None if it may take part."""
    if first.version != other.version:
        return (
            f"Ratchet {other.version} is installed on {other.host}, and {first.version} on {first.host}: install the "
            "same version on every machine of the learner"
        )
    parts = sorted(part for part, digest in first.digests.items() if other.digests.get(part) != digest)
    if parts:
        return (
            f"base_model {other.base_model} on {other.host} is not {first.base_model} on {first.host}: its "
            f"{', '.join(parts)} differ; give every machine of the learner the same files"
        )
    return None


def compare_processes(own: LearnerProcessIdentity, environ: Mapping[str, str]) -> None:
    """Return once all processes are known to be alike. Raises LearnerRefused in all of them, WorkerProcessLost."""
    import torch.distributed

    rank, count = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    if count == 1:
        return
    try:
        store = torch.distributed.PrefixStore(
            _PREFIX,
            torch.distributed.TCPStore(
                environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False, timeout=_TIMEOUT
            ),
        )
        store.set(str(rank), json.dumps(asdict(own)))
        if rank == 0:
            others = [LearnerProcessIdentity(**json.loads(store.get(str(other)))) for other in range(1, count)]
            found = (text for other in others if (text := difference(own, other)) is not None)
            store.set("verdict", next(found, ""))
        verdict = store.get("verdict").decode()
    except RuntimeError as error:
        raise WorkerProcessLost(f"the processes of the learner did not find each other: {error}") from error
    if verdict:
        raise LearnerRefused(verdict)
