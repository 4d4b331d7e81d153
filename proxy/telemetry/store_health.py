"""Whether the store is well, as `ratchet_store_up` tells it: everything that is asked of it has to work.

A store on a full disk still answers who reads. Hence each kind of use tells its last outcome here, and one that failed
is enough.
"""

from __future__ import annotations

from prometheus_client import Gauge


class StoreStatus:
    """The last outcome of each use of the store. May be told from any thread."""

    def __init__(self, gauge: Gauge) -> None:
        self._failing: dict[str, None] = {"reading": None}  # until it has been read
        gauge.set_function(lambda: float(not self._failing))

    def told(self, use: str, *, well: bool) -> None:
        """Take note of how a use of the store came out."""
        if well:
            self._failing.pop(use, None)
        else:
            self._failing[use] = None
