"""The benchmark of the proxy's cost measures what it says, if only for a moment."""

from __future__ import annotations

from benchmarks.proxy_overhead import run, table


def test_the_table_of_costs_has_every_row_of_the_proxy_and_of_the_floor() -> None:
    ratchet, floor = run(["ratchet", "floor"], seconds=0.3, calls=50)
    assert not ratchet.not_run
    assert not floor.not_run
    assert ratchet.cpu_call > floor.cpu_call > 0
    assert ratchet.cpu_chunk > floor.cpu_chunk > 0
    assert len(ratchet.memory_after) == 2, "the one that serves and the one that ships"
    assert "not run" not in table([ratchet, floor])
