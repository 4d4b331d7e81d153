"""Error rates of the release policy, by simulation over the product's own decision code (nothing is trained or served).

Series of fifty versions of known quality, of four kinds, at several traffics and round sizes, under four policies: no
gate, a fixed A/B test of 200 a side, the gate that Ratchet had until 2026-11, and the product's. The A/B test and the
former gate see scores without the 15 minutes of lag that the product is charged with, and let training wait.

    equal    every version is as good as the one before
    planted  one harmful version among equal ones
    mixed    70% small gains, 15% none, 15% harmful (-0.02, -0.05, -0.10, -0.30)
    gain     mixed without harmful ones
    plateau  mixed with gains of a tenth
    rounds   mixed and plateau over the same number of trajectories, guarded, with rounds of different sizes; the gain
             of a version grows with the 0th, 0.5th or 1st power of its round's size

The first five have one row for each traffic, with 0/1 scores of mean 0.5 in groups of 8, and one for each other shape
of scores at 300 trajectories a day. `--quick` has the one row that both have in common.

    python -m benchmarks.release [--quick] [--json] [--only equal,mixed] [--series 200] [--processes 2]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from tests.harness.releases.contenders import FixedTest, FormerGate, GuardedRelease, ReleaseContender, Ungated
from tests.harness.releases.series import play, summarize
from tests.harness.releases.world import HARMFUL_STEPS, World

CONTENDERS: dict[str, Callable[[World], ReleaseContender]] = {
    "no gate": lambda world: Ungated(),
    "A/B of 200": lambda world: FixedTest(),
    "former gate": FormerGate,
    "guarded": GuardedRelease,
}
PLAIN_TRAFFIC = (300.0, 256)  # trajectories a day, and of a round
TRAFFIC = (
    PLAIN_TRAFFIC, (50.0, 128), (100.0, 128), (1000.0, 256), (3000.0, 512), (10000.0, 1024), (30000.0, 2000),
)  # fmt: skip
PLAIN = "0/1 p=.5 groups"
SHAPES: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "0/1 p=.5 ungrouped": {"grouped": False},
    "0/1 p=.1 groups": {"mean": 0.1},
    "0/1 p=.1 ungrouped": {"mean": 0.1, "grouped": False},
    "0/1 p=.8 groups": {"mean": 0.8},
    "0/1 p=.8 ungrouped": {"mean": 0.8, "grouped": False},
    "0/1 p=.9 groups": {"mean": 0.9},
    "0/1 p=.9 ungrouped": {"mean": 0.9, "grouped": False},
    "continuous groups": {"score": "continuous"},
    "continuous ungrouped": {"score": "continuous", "grouped": False},
}
ROUND_SIZES, GROWTHS = (64, 128, 256, 512, 1024, 2048), (0.0, 0.5, 1.0)
ROUNDS_TRAFFIC = ((300.0, 12_800), (3000.0, 102_400))  # trajectories a day, and of a series
KINDS = ("equal", "planted", "mixed", "gain", "plateau", "rounds")


@dataclass(frozen=True)
class SeriesCase:
    """One row of a table."""

    kind: str
    shape: str
    contender: str
    world: World


def cases(kinds: tuple[str, ...], quick: bool) -> Iterator[SeriesCase]:
    """Yield the rows that are asked for."""
    traffic = (PLAIN_TRAFFIC,) if quick else TRAFFIC
    shapes = [PLAIN] if quick else list(SHAPES)
    rows = [(PLAIN, *one) for one in traffic] + [(shape, *PLAIN_TRAFFIC) for shape in shapes if shape != PLAIN]
    for kind in kinds:
        if kind == "rounds":
            yield from _of_round_sizes(ROUNDS_TRAFFIC[:1] if quick else ROUNDS_TRAFFIC)
            continue
        for shape, per_day, round_size in rows:
            steps = "mixed" if kind == "gain" else kind
            yield from _of_one_world(kind, shape, World(steps, per_day=per_day, round_size=round_size, **SHAPES[shape]))


def _of_round_sizes(traffic: Sequence[tuple[float, int]]) -> Iterator[SeriesCase]:
    for steps, (per_day, trajectories), growth, size in product(("mixed", "plateau"), traffic, GROWTHS, ROUND_SIZES):
        world = World(steps, per_day=per_day, round_size=size, versions=trajectories // size, growth=growth)
        yield SeriesCase("rounds", PLAIN, "guarded", world)


def _of_one_world(kind: str, shape: str, world: World) -> Iterator[SeriesCase]:
    if kind == "planted":
        length = 1.5 if world.round_size < 2000 else 1.0
        for size in (step for step in HARMFUL_STEPS if step < world.mean):
            yield SeriesCase(kind, shape, "guarded", replace(world, size=size, length=length))
        return
    changed = replace(world, length=1.15) if kind == "equal" else world
    changed = replace(changed, harmful=0.0) if kind == "gain" else changed
    for contender in CONTENDERS:
        if kind != "equal" or (contender != "no gate" and (contender == "guarded" or shape == PLAIN)):
            yield SeriesCase(kind, shape, contender, changed)


def measure(case: SeriesCase, series: int, pool: Any) -> dict[str, Any]:
    """Play the series of one row."""
    played = pool.starmap(_play, [(case.contender, case.world, seed) for seed in range(series)], chunksize=4)
    return {
        "kind": case.kind,
        "shape": case.shape,
        "policy": case.contender,
        "series": series,
        "world": asdict(case.world),
        "figures": summarize(case.world, played),
    }


def _play(contender: str, world: World, seed: int) -> Any:
    return play(world, CONTENDERS[contender](world), seed)


def describe(row: dict[str, Any]) -> str:
    """Return a row as one line."""
    figures, world = row["figures"], row["world"]
    beginning = f"{row['kind']:8} {world['per_day']:6.0f}/day R{world['round_size']:<5} {row['shape']:18} "
    if row["kind"] == "planted":
        found = f"median {figures['median']}, 90% {figures['q90']}, found {figures['found']:.0%}"
        return f"{beginning}-{world['size']:.2f}: {found}"
    if row["kind"] == "rounds":
        trajectories = world["versions"] * world["round_size"]
        beginning += f"{world['kind']}, {trajectories} trajectories, growth {world['growth']:.1f}: "
        beginning += f"mean {figures['average']:.3f} "
    harm = ", ".join(f"{name[6:]}: {value:.0%}" for name, value in figures.items() if name.startswith("found_"))
    return (
        f"{beginning}{row['policy']:12} loss {figures['loss']:.3f}  final {figures['final']:.3f} "
        f"(worst 5% {figures['final_of_the_worst_5%']:.2f})  rollbacks {figures['rollbacks']:.1f} "
        f"(false {figures['false_rollbacks']:.2f}, in {figures['series_with_a_false_rollback']:.1%} of series)  "
        f"below 0: {figures['below_first']:.0%}, {figures['loss_to_first']:.3f}  made {figures['made']:.1f}  {harm}"
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one traffic, one shape of scores and 12 series a row")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of series, separated by commas")
    parser.add_argument("--series", type=int, help="series a row (default 200; 12 with --quick)")
    parser.add_argument("--per-day", type=float, help="only rows of this traffic")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    kinds = tuple(given.only.split(","))
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"--only {','.join(unknown)}: choose from {', '.join(KINDS)}")
    series, rows = given.series or (12 if given.quick else 200), []
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        for case in cases(kinds, given.quick):
            if given.per_day not in (None, case.world.per_day):
                continue
            rows.append(measure(case, series, pool))
            if not given.json:
                print(describe(rows[-1]), flush=True)
    if given.json:
        json.dump(rows, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
