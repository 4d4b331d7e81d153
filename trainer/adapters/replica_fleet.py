"""The vLLM replicas that the controller knows now, and questions to all of them at once.

Promises that a replica that does not answer delays nobody: each is called in a thread of its own, and once enough have
answered the others get a short time to do the same. A late replica counts as missing.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from typing import TypeVar, overload

from ratchet.store.access.replicas import ReplicaList
from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.errors import AdapterRefused, EngineError, EngineUnreachable

log = logging.getLogger(__name__)

_REFRESH_SECONDS = 5.0
_GRACE_SECONDS = 2.0

_T = TypeVar("_T")


def quorum_of(replicas: int, quorum: int | None) -> int:
    """Return how many of the replicas must serve a version: all of one or two, else all but one, or `quorum`."""
    default = replicas if replicas <= 2 else replicas - 1
    return max(1, default if quorum is None else min(quorum, replicas))


class ReplicaFleet(Sequence[VllmServer]):
    """The replicas of a list that may change; `refresh` reads it again."""

    def __init__(self, entries: Sequence[str], key: str | None = None, timeout: float = 60.0) -> None:
        self._list = ReplicaList(entries)
        self._key = key
        self._timeout = timeout
        self._made: dict[str, VllmServer] = {}
        self._current: tuple[VllmServer, ...] = ()
        self._refreshed_at = 0.0
        self._problem: str | None = None
        self.refresh(0.0)

    @overload
    def __getitem__(self, index: int) -> VllmServer: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[VllmServer]: ...
    def __getitem__(self, index: int | slice) -> VllmServer | Sequence[VllmServer]:
        return self._current[index]

    def __len__(self) -> int:
        return len(self._current)

    def __iter__(self) -> Iterator[VllmServer]:
        return iter(self._current)

    def refresh(self, now: float) -> None:
        """Read the list again, at most every few seconds. Replicas that stay keep their connections."""
        if self._current and (self._list.is_fixed or now - self._refreshed_at < _REFRESH_SECONDS):
            return
        self._refreshed_at = now
        before = {replica.url for replica in self._current}
        found = self._list.resolve()
        if self._list.problem not in (None, self._problem):
            log.warning("event=replicas_not_read reason=%r", self._list.problem)
        self._problem = self._list.problem
        for url in found:
            if url not in self._made:
                self._made[url] = VllmServer(url, self._timeout, self._key)
        self._current = tuple(self._made[url] for url in found)
        after = {replica.url for replica in self._current}
        if before and before != after:
            log.info("event=replicas_changed came=%s went=%s", sorted(after - before), sorted(before - after))

    def close(self) -> None:
        """Close the connections."""
        for replica in self._made.values():
            replica.close()


def ask_all(
    replicas: Sequence[VllmServer], ask: Callable[[VllmServer], _T], enough: int
) -> tuple[dict[str, _T], dict[str, EngineError]]:
    """Return the answers and the errors, by URL. Raises what is not an EngineError.

    When `enough` replicas have answered, the others get as long again, and at least two seconds.
    """
    results: queue.SimpleQueue[tuple[str, _T | Exception]] = queue.SimpleQueue()

    def run(replica: VllmServer) -> None:
        try:
            results.put((replica.url, ask(replica)))
        except Exception as error:  # noqa: BLE001 -- raised below, in the caller's thread
            results.put((replica.url, error))

    started = time.monotonic()
    for replica in replicas:
        threading.Thread(target=run, args=(replica,), name=f"ask {replica.url}", daemon=True).start()
    answers: dict[str, _T] = {}
    errors: dict[str, EngineError] = {}
    deadline: float | None = None
    while len(answers) + len(errors) < len(replicas):
        try:
            url, result = results.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if isinstance(result, EngineError):
            errors[url] = result
        elif isinstance(result, Exception):
            raise result
        else:
            answers[url] = result
        if deadline is None and len(answers) >= enough:
            now = time.monotonic()
            deadline = now + max(_GRACE_SECONDS, now - started)
    for replica in replicas:
        if replica.url not in answers and replica.url not in errors:
            seconds = time.monotonic() - started
            errors[replica.url] = EngineUnreachable(f"vLLM at {replica.url} has not answered within {seconds:.0f} s")
    return answers, errors


def replicas_that_serve(replicas: Sequence[VllmServer], names: Set[str]) -> list[VllmServer]:
    """Return the replicas that answer and serve all these names. Raises EngineUnreachable or AdapterRefused if
    there is none.
    """
    known = tuple(replicas)
    models, errors = ask_all(known, VllmServer.models, 1)
    serving = [one for one in known if names <= set(models.get(one.url, ()))]
    if not serving and errors:
        raise next(iter(errors.values()))
    if not serving:
        raise AdapterRefused(f"of {len(known)} replicas none serves {' and '.join(sorted(names))}")
    return serving
