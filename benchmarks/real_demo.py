"""A real pretrained model learns: `ratchet demo --real` with several seeds, in float32 and in bfloat16.

    python -m benchmarks.real_demo [--seeds 1,2,3] [--dtypes float32,bfloat16] [--versions 10] [--model FOLDER]
    python -m benchmarks.real_demo --show       # the tables of the runs that are there

Each run is a process of its own; its state is in FOLDER/DTYPE-SEED. A run that is there is not repeated. The tables are
those of README.md and RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from ratchet.demo.report import CURVE, RESULT

LOAD = "load.json"  # one-minute load averages before and after a run


def run(folder: Path, seed: int, dtype: str, arguments: Iterable[str]) -> None:
    """Run one demo, unless its result is there."""
    if (folder / "demo-real" / RESULT).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    before = os.getloadavg()[0]
    command = [sys.executable, "-m", "ratchet", "demo", "--real", "--seed", str(seed), "--state-dir", str(folder)]
    chosen = [] if dtype == "auto" else ["--dtype", dtype]
    with (folder / "output.txt").open("w") as output:
        done = subprocess.run([*command, *chosen, *arguments], stdout=output, stderr=subprocess.STDOUT, check=False)
    (folder / LOAD).write_text(json.dumps([before, os.getloadavg()[0]]))
    print(f"{folder}: exit code {done.returncode}, curve {folder / 'demo-real' / CURVE}", file=sys.stderr, flush=True)


def runs(folder: Path) -> Iterator[tuple[dict[str, Any], list[float]]]:
    """Yield result and load of each run, by number format and seed."""
    found = []
    for path in folder.glob(f"*/demo-real/{RESULT}"):
        load = path.parents[1] / LOAD
        found.append((json.loads(path.read_text()), json.loads(load.read_text()) if load.exists() else []))
    yield from sorted(found, key=lambda one: (one[0]["dtype"] == "bfloat16", one[0]["seed"]))


def learning_rows(found: Iterable[tuple[dict[str, Any], list[float]]]) -> Iterator[str]:
    """Yield the table of README.md: success before and after, versions, calls, time."""
    yield from _head(
        "format", "seed", "", "greedy (95% interval)", "sampled (95% interval)", "versions, proven, served", "calls",
        "failed calls", "seconds (load)",
    )  # fmt: skip
    for result, load in found:
        counts = f"{len(result['rounds'])}, {result['versions_proven']}, {result['swaps']}"
        loads = f" ({min(load):.0f} to {max(load):.0f})" if load else ""
        yield f"| {result['dtype']} | {result['seed']} | before | {_success(result['before'])} | | | | |"
        yield (
            f"| | | after | {_success(result['after'])} | {counts} | {result['calls']:,} | {result['failed_calls']} "
            f"| {result['seconds_total']:.0f}{loads} |"
        )


def number_rows(found: Iterable[tuple[dict[str, Any], list[float]]]) -> Iterator[str]:
    """Yield the table of RESULTS.md: how far rounds moved the policy, and how well vLLM and the learner agree."""
    yield from _head(
        "format", "seed", "k3 of a round: median (range)", "its floor", "rollouts rejected",
        "mean \\|trainer - engine\\|, nats", "proofs: median slope, correlation", "seconds of a round",
    )  # fmt: skip
    for result, _ in found:
        rounds = result["rounds"]
        kls = [row["approx_kl"] for row in rounds]
        trained = sum(int(row["trajectories"]) for row in rounds)
        rejected = sum(int(row["rows_rejected"]) for row in rounds)
        yield (
            f"| {result['dtype']} | {result['seed']} | {_median(kls, '.4f')} ({min(kls):.4f} to {max(kls):.4f}) "
            f"| {_median([row.get('approx_kl_floor') for row in rounds], '.1e')} | {rejected} of {trained} "
            f"| {result['mismatch_mean']:.5f} | {_median(_weakest(rounds, 'slope'), '.2f')}, "
            f"{_median(_weakest(rounds, 'correlation'), '.2f')} "
            f"| {_median([row['seconds'] for row in rounds], '.1f')} |"
        )


def _head(*names: str) -> Iterator[str]:
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"


def _success(row: dict[str, Any]) -> str:
    def shown(how: str) -> str:
        share, low, high = (100 * row[how][name] for name in ("success", "low", "high"))
        return f"{share:.1f}% ({low:.1f} to {high:.1f})"

    return f"{shown('greedy')} | {shown('sampled')}"


def _weakest(rounds: Iterable[dict[str, Any]], figure: str) -> list[float | None]:
    """Return the smallest of the replicas' proofs of each round; None: not measured."""
    return [min((proof[figure] for proof in row["proofs"] if figure in proof), default=None) for row in rounds]


def _median(values: Iterable[float | None], format: str) -> str:
    known = [value for value in values if value is not None and value == value]
    return f"{median(known):{format}}" if known else "not known"


def main() -> None:
    """Run what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="auto: the default, float32 on a CPU")
    parser.add_argument("--folder", type=Path, default=Path(".ratchet/real_demo"))
    parser.add_argument("--show", action="store_true", help="run nothing")
    chosen, others = parser.parse_known_args()  # the others are for `ratchet demo`
    for dtype in () if chosen.show else chosen.dtypes.split(","):
        for seed in map(int, chosen.seeds.split(",")):
            run(chosen.folder / f"{dtype}-{seed}", seed, dtype, others)
    found = list(runs(chosen.folder))
    for rows in (learning_rows(found), number_rows(found)):
        print("\n".join(rows), end="\n\n")


if __name__ == "__main__":
    main()
