"""The benchmark of shipping carries every call that it makes, also those whose ends come later, into a sound store."""

from __future__ import annotations

from pathlib import Path

from benchmarks.shipping import carry, continuing, journal, opening
from ratchet.store.states import CallState
from ratchet.store.store import open_store
from ratchet.store.verify import verify


def test_every_call_of_the_benchmark_is_in_the_store(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    store = open_store(url)
    for later, make in ((0, opening), (2, continuing)):
        file = tmp_path / f"{later}.journal"
        assert carry(url, file, journal(file, make(25), 6, later))["us"] > 0
    calls = store.calls.page(100)
    assert (len(calls), {call.state for call in calls}) == (50, {CallState.ANSWERED})
    store.close()
    assert verify(url).sound
