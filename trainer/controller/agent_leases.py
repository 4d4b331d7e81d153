"""The leases of a process's agents: one thread renews those that it holds and waits for those that others hold.

Several controllers of the same agents share them: each also holds a lease that shows that it lives, takes at most its
fair share of the agents that nobody holds, gives up what it has more than that once a new controller has come, and
takes over the agents of one that died. Promises: a process that stood still for longer than a lease trusts none of its
leases until the store has confirmed them. The store does not depend on leases: a round that another trainer overtook
cannot commit.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from enum import Enum, auto
from hashlib import blake2b

from ratchet.store.errors import StoreUnavailable
from ratchet.store.ids import new_id
from ratchet.store.store import Store

log = logging.getLogger(__name__)

_PREFIX = "trainer:"  # of the names of the agents' leases
_CONTROLLER = "controller:"  # of the leases that show which controllers live, followed by a digest of their agents
_MAX_HOST = 64  # characters


class LeaseState(Enum):
    """How an agent's lease stands."""

    HELD = auto()
    OVERDUE = auto()  # held, but not renewed in time: perhaps another process has taken it
    WAITING = auto()  # another process holds it, or the store has not answered yet


class AgentLeases:
    """The leases of one process. `on_change` is called, in the thread, when one was taken or lost."""

    def __init__(self, store: Store, seconds: float, on_change: Callable[[], None]) -> None:
        self._store = store
        self._seconds = seconds
        self._on_change = on_change
        self._owner = new_id(f"{socket.gethostname()[:_MAX_HOST]}:{os.getpid()}")
        self._wanted: set[str] = set()
        self._renewed_at: dict[str, float] = {}  # monotonic, of the leases that are held
        self._given_up: dict[str, float] = {}  # when others could take them for the first time; monotonic
        self._presence = ""  # the name of the lease that shows that this controller lives
        self._lock = threading.Lock()  # of all these, and of the release of a lease while others are renewed
        self._wake = threading.Event()
        self._stopped = False
        self._logged = ""
        self.surplus = 0  # leases to give up, as other controllers hold fewer
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
        self._thread.start()

    def request(self, alias: str) -> None:
        """Take an agent's lease as soon as nobody else holds it."""
        with self._lock:
            self._wanted.add(_PREFIX + alias)
        self._wake.set()

    def state_of(self, alias: str) -> LeaseState:
        """Return how an agent's lease stands."""
        with self._lock:
            renewed_at = self._renewed_at.get(_PREFIX + alias)
        if renewed_at is None:
            return LeaseState.WAITING
        return LeaseState.HELD if time.monotonic() - renewed_at <= self._seconds else LeaseState.OVERDUE

    def release(self, alias: str) -> None:
        """Give an agent's lease back for good; another process may take it at once."""
        with self._lock:
            self._wanted.discard(_PREFIX + alias)
            self._release(_PREFIX + alias)

    def give_up(self, alias: str) -> None:
        """Give an agent's lease to a controller that holds fewer; take it again if none has after a lease's time."""
        with self._lock:
            self._given_up[_PREFIX + alias] = time.monotonic()
            self._release(_PREFIX + alias)
            self.surplus = max(0, self.surplus - 1)

    def close(self) -> None:
        self._stopped = True
        self._wake.set()
        self._thread.join()
        for name in tuple(self._wanted):
            self.release(name.removeprefix(_PREFIX))
        with self._lock:
            self._release(self._presence)

    def _release(self, name: str) -> None:
        """Give a lease back; the lock is held."""
        held = self._renewed_at.pop(name, None)
        try:
            if held is not None:
                self._store.leases.release(name, self._owner)
        except StoreUnavailable as outage:
            log.warning("event=lease_not_released name=%s reason=%r", name, str(outage))

    def _run(self) -> None:
        """Renew at a quarter of a lease's time, and look who else is there; look for free leases at a tenth of it."""
        renew_at = 0.0
        while not self._stopped:
            self._wake.clear()
            try:
                renews = time.monotonic() >= renew_at
                if renews:
                    self._renew()
                    renew_at = time.monotonic() + self._seconds / 4
                if renews or self._wanted - self._renewed_at.keys():
                    self._share()
            except StoreUnavailable as outage:
                log.warning("event=leases_not_renewed reason=%r", str(outage))
            self._wake.wait(self._seconds / 10)

    def _renew(self) -> None:
        with self._lock:
            held = dict(self._renewed_at)
            requested_at = time.monotonic()
            renewed = self._store.leases.renew(held, self._owner, self._seconds)
            self._renewed_at = dict.fromkeys(renewed, requested_at)
        for name in sorted(held.keys() - renewed):
            log.warning("event=lease_lost name=%s", name)
        if held.keys() - renewed:
            self._on_change()

    def _share(self) -> None:
        """Show that this controller lives, take the wanted leases that nobody holds up to the fair share, and note how
        many are too many.
        """
        with self._lock:
            self._show_presence()
            holders = self._store.leases.holders(_PREFIX) if self._wanted else []
            peers = {one.owner for one in self._store.leases.holders(self._kind)} | {self._owner}
            counts = Counter(dict.fromkeys(peers, 0))
            counts.update(one.owner for one in holders if one.owner in peers and one.name in self._wanted)
            fair = -(-len(self._wanted) // len(peers))
            free = self._wanted - {one.name for one in holders} - self._renewed_at.keys()
            taken = self._take(free, fair - counts[self._owner])
            least = min(counts.values())
            self.surplus = 0 if free else max(0, (counts[self._owner] - least) // 2)
            waiting = ",".join(sorted(self._wanted - self._renewed_at.keys()))
        if waiting and waiting != self._logged:
            log.info("event=lease_waiting names=%s reason='another trainer holds them'", waiting)
        self._logged = waiting
        if taken or self.surplus:
            self._on_change()

    @property
    def _kind(self) -> str:
        """The start of the names by which controllers of the same agents show that they live."""
        digest = blake2b("\n".join(sorted(self._wanted)).encode(), digest_size=8).hexdigest()
        return f"{_CONTROLLER}{digest}:"

    def _show_presence(self) -> None:
        name = self._kind + self._owner
        if name == self._presence and name in self._renewed_at:
            return
        self._release(self._presence)
        self._presence = name
        requested_at = time.monotonic()
        if self._store.leases.acquire(name, self._owner, self._seconds):
            self._renewed_at[name] = requested_at

    def _take(self, free: set[str], most: int) -> bool:
        """Take at most that many free leases; return whether any was."""
        now, taken = time.monotonic(), 0
        for name in sorted(free):
            if taken < most and now - self._given_up.get(name, -self._seconds) >= self._seconds:
                requested_at = time.monotonic()
                if self._store.leases.acquire(name, self._owner, self._seconds):
                    self._renewed_at[name] = requested_at
                    taken += 1
        return taken > 0
