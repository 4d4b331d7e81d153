"""How often the tuner's interval of a paired difference holds the truth, beside Student's plain t.

Agents whose true difference is known answer few and many tasks, often equal, seldom different, skewed; thousands of
times each. Ends with status 1 where the interval holds the truth in less than 85% of any case.

    python -m benchmarks.coverage [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from ratchet.store.statistics import interval, student_t
from ratchet.trainer.statistics import sign_flip_p

LEAST = 0.85
TASKS = (4, 6, 10, 20, 50, 100)
Draw = Callable[[random.Random], float]


@dataclass(frozen=True)
class Case:
    """A kind of difference: how one task's is drawn, its true mean, how far one can lie from zero."""

    name: str
    draw: Draw
    truth: float
    spread: float = 1.0


@dataclass(frozen=True)
class IntervalCoverage:
    """Shares of intervals that hold the truth, mean widths, and how often the test says no to zero."""

    case: str
    tasks: int
    held: float
    width: float
    plain_covered: float
    plain_width: float
    rejected: float  # by the sign-flip test; where the truth is zero these are false alarms


def agents(one: float, other: float, attempts: int = 1) -> Draw:
    """Two agents that succeed with a chance each at every task."""

    def draw(chance: random.Random) -> float:
        return statistics.fmean((chance.random() < one) - (chance.random() < other) for _ in range(attempts))

    return draw


def every_difficulty(gain: float, attempts: int) -> Draw:
    """Tasks from hard to easy; one agent is better by the gain at each."""

    def draw(chance: random.Random) -> float:
        easy = chance.uniform(0.0, 1.0 - gain)
        return statistics.fmean((chance.random() < easy + gain) - (chance.random() < easy) for _ in range(attempts))

    return draw


CASES = (
    Case("equal, half succeed", agents(0.5, 0.5), 0.0),
    Case("equal, 9 of 10 succeed", agents(0.9, 0.9), 0.0),
    Case("0.97 against 0.90", agents(0.97, 0.9), 0.07),
    Case("0.10 against 0.02", agents(0.1, 0.02), 0.08),
    Case("0.7 against 0.5, 4 attempts", agents(0.7, 0.5, 4), 0.2),
    Case("every difficulty, gain 0.1", every_difficulty(0.1, 1), 0.1),
    Case("every difficulty, gain 0.1, 4 attempts", every_difficulty(0.1, 4), 0.1),
    Case("one task in 50 differs", agents(0.02, 0.0), 0.02),
    Case("one task in 20 differs", agents(0.05, 0.0), 0.05),
    Case("one task in 5 differs", agents(0.2, 0.0), 0.2),
    Case("normal scores", lambda chance: chance.gauss(0.1, 0.28), 0.1),
    Case("skewed scores", lambda chance: min(5.0, chance.expovariate(1.0)), 1 - math.exp(-5.0), 5.0),
)


def measure(case: Case, tasks: int, times: int, chance: random.Random) -> IntervalCoverage:
    """Return how often both intervals hold the truth."""
    covered = plain_covered = rejected = 0
    width = plain_width = 0.0
    for _ in range(times):
        values = [case.draw(chance) for _ in range(tasks)]
        low, high = interval(values, case.spread)
        plain_low, plain_high = plain_t(values)
        covered += low <= case.truth <= high
        plain_covered += plain_low <= case.truth <= plain_high
        width, plain_width = width + high - low, plain_width + plain_high - plain_low
        rejected += tasks <= 10 and sign_flip_p(values) < 0.05
    shares = [number / times for number in (covered, width, plain_covered, plain_width, rejected)]
    return IntervalCoverage(case.name, tasks, *shares)


def plain_t(values: Sequence[float]) -> tuple[float, float]:
    """Return Student's interval of the mean."""
    reach = student_t(0.95, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - reach, mean + reach


def main() -> int:
    """Print the table; return 1 where an interval holds the truth too seldom."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    times = 200 if given.quick else 2000
    chance = random.Random(1)
    found = [measure(case, tasks, times, chance) for case in CASES for tasks in TASKS]
    if given.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    else:
        print(f"{'':<40} {'tasks':>5} {'held':>6} {'width':>6} {'t held':>7} {'t width':>7} {'p<0.05':>7}")
        for one in found:
            rejected = f"{one.rejected:7.3f}" if one.tasks <= 10 else ""
            print(
                f"{one.case:<40} {one.tasks:>5} {one.held:6.3f} {one.width:6.3f} {one.plain_covered:7.3f} "
                f"{one.plain_width:7.3f} {rejected}"
            )
    return 0 if all(one.held >= LEAST for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
