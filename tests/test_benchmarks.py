"""The benchmarks: which modules they may import, and that `--json` prints JSON and nothing else."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

# The quickest form of a benchmark. STORE is replaced by an empty database.
QUICK: dict[str, tuple[str, ...]] = {
    "agent_calls": ("--quick",),
    "agent_swap": ("--shape", "tiny", "--repetitions", "1"),
    "coordinator_restart": ("--trajectories", "50", "--answers", "3"),
    "coverage": ("--quick",),
    "gpu": ("--shape", "tiny", "--device", "cpu"),
    "linking": ("--quick", "--only", "reminders"),
    "linking_memory": ("--trajectories", "300"),
    "listing": ("--trajectories", "50", "--store", "STORE"),
    "proxy_overhead": ("--only", "ratchet", "floor", "--seconds", "0.3", "--calls", "50"),
    "release": ("--quick", "--only", "planted", "--series", "2"),
    "shipping": ("--calls", "100"),
    "storage": ("--trajectories", "2", "--turns", "2", "--store", "STORE"),
}
# Not run here, with the reason.
LONG = {
    "default_rates": "trains on the real vLLM",
    "durability": "tests/proxy/test_campaign.py runs the campaign",
    "exactly_once": "tests/trainer/test_exactly_once.py runs the campaign",
    "harmful_versions": "trains on the real vLLM",
    "hostile": "tests/proxy/test_hostile.py runs the campaign",
    "real_clients": "needs the clients' environments and the real vLLM",
    "real_demo": "trains on the real vLLM",
    "partitions": "needs root for network namespaces, and minutes",
    "several_agents": "trains on the real vLLM",
    "swaps": "tests/trainer/test_swaps.py runs the campaign",
    "tuner_overhead": "writes task sets of gigabytes",
}


def _imports(folder: str) -> Iterator[tuple[str, str]]:
    for file in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                yield str(file.relative_to(ROOT)), node.module or ""
            elif isinstance(node, ast.Import):
                yield from ((str(file.relative_to(ROOT)), alias.name) for alias in node.names)


@pytest.mark.slow
def test_tests_do_not_import_benchmarks_and_benchmarks_import_only_the_harness_of_the_tests() -> None:
    wrong = [f"{file}: {name}" for file, name in _imports("tests") if name.split(".")[0] == "benchmarks"]
    wrong += [
        f"{file}: {name}"
        for file, name in _imports("benchmarks")
        if name.split(".")[0] == "tests" and not name.startswith("tests.harness.")
    ]
    wrong += [
        f"{file}: {name}"
        for file, name in _imports("tests/harness")
        if name.startswith("tests.") and not name.startswith("tests.harness.")
    ]
    assert wrong == []


def test_every_benchmark_with_json_output_is_listed() -> None:
    found = {
        file.stem
        for file in (ROOT / "benchmarks").glob("*.py")
        if 'add_argument("--json"' in file.read_text() and '"__main__"' in file.read_text()
    }
    assert found == QUICK.keys() | LONG.keys()


def _run(name: str, folder: Path) -> Any:
    store = f"sqlite:///{folder / 'empty.db'}"
    arguments = [store if argument == "STORE" else argument for argument in QUICK[name]]
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--json"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr  # 1: a figure misses its target, as on a busy machine
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(QUICK.keys() - {"coordinator_restart", "gpu", "linking", "linking_memory", "proxy_overhead"})
)
def test_a_benchmark_prints_json_and_nothing_else(name: str, tmp_path: Path) -> None:
    assert _run(name, tmp_path)


@pytest.mark.slow
def test_the_linking_benchmark_reports_how_calls_were_linked(tmp_path: Path) -> None:
    (result,) = _run("linking", tmp_path)
    assert (result["kind"], result["good"], result["linked_by"]) == ("reminders", True, {"root": 3, "graph+gap": 9})


@pytest.mark.slow
def test_after_the_coordinators_death_every_call_continues_its_trajectory(tmp_path: Path) -> None:
    result = _run("coordinator_restart", tmp_path)
    assert (result["linked_by"], result["restored"]) == ({"graph": 100}, 50)


@pytest.mark.slow
def test_the_memory_of_linking_is_near_its_estimate(tmp_path: Path) -> None:
    result = _run("linking_memory", tmp_path)
    assert (result["trajectories"], result["answers"]) == (300, 6_000)
    assert 0.75 < result["resident"] / result["estimated"] < 1.25


@pytest.mark.slow
def test_the_gpu_benchmark_measures_the_learner_beside_trl(tmp_path: Path) -> None:
    cases = _run("gpu", tmp_path)["cases"]
    assert [(case["what"], case["length"]) for case in cases] == [
        *((what, length) for what in ("ratchet", "trl sft") for length in (32, 64, 128)),
        *(("ratchet, fsdp2", length) for length in (32, 64)),
    ]
    for case in cases:
        assert case["rows"] * case["length"] == pytest.approx(case["tokens_per_second"] * case["seconds"])
        assert case["mfu"] is case["peak_gib"] is None


@pytest.mark.alone
def test_the_proxys_overhead_is_measured_for_the_proxy_and_the_floor(tmp_path: Path) -> None:
    ratchet, floor = _run("proxy_overhead", tmp_path)
    assert not ratchet["not_run"]
    assert not floor["not_run"]
    assert ratchet["cpu_call"] > floor["cpu_call"] > 0
    assert ratchet["cpu_chunk"] > floor["cpu_chunk"] > 0
    assert len(ratchet["memory_after"]) == 2, "the worker and the store writer"
