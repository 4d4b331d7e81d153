"""Every benchmark with --json prints JSON and nothing else to its standard output; a new one has to be listed here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# In their quickest form; STORE is an empty database.
QUICK: dict[str, tuple[str, ...]] = {
    "coverage": ("--quick",),
    "listing": ("--trajectories", "50", "--store", "STORE"),
    "shipping": ("--calls", "100"),
    "storage": ("--trajectories", "2", "--turns", "2", "--store", "STORE"),
}

# Too long for a test, even in their quickest form: why.
LONG = {
    "default_rates": "trains on the real vLLM",
    "durability": "kills processes and waits out outages",
    "exactly_once": "kills processes of a whole project",
    "hostile": "a campaign of hostile requests; tests/proxy/test_hostile.py runs its parts",
    "linking": "eight kinds of traffic through a proxy; tests/proxy/test_linking_benchmark.py runs its parts",
    "proxy_overhead": "measures seconds of load on several servers",
    "real_clients": "clients in environments of their own, on the real vLLM",
    "swaps": "measures a steady time without swaps",
    "tuner_overhead": "writes task sets of gigabytes",
}


def test_every_benchmark_that_prints_json_is_listed() -> None:
    found = {
        file.stem
        for file in (ROOT / "benchmarks").glob("*.py")
        if 'add_argument("--json"' in file.read_text() and '"__main__"' in file.read_text()
    }
    assert found == QUICK.keys() | LONG.keys()


@pytest.mark.parametrize("name", sorted(QUICK))
def test_a_benchmark_prints_json_and_nothing_else(name: str, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'empty.db'}"
    words = [store if word == "STORE" else word for word in QUICK[name]]
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *words, "--json"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr  # 1: a figure is not what it should be, as on a busy machine
    json.loads(done.stdout)
