"""Problems of two steps, in words, each with one correct answer, and their task set.

`python -m examples.planner.problems --out examples/planner/tasks` writes `train.jsonl` and `test.jsonl`, one `{"id",
"question", "answer"}` per line. As in `examples.math`, only the test set uses its pairs of numbers.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.math.problems import LARGEST, calculated, drawn, is_held_out, write_rows

SIZES = {"train": 240, "test": 80}
WORDINGS = {
    "+-": (
        "Anna has {a} apples, gets {b} more and eats {c}. How many apples are left?",
        "What is {a} plus {b}, minus {c}?",
    ),
    "-+": (
        "Anna has {a} apples, eats {b} and gets {c} more. How many apples does Anna have?",
        "What is {a} minus {b}, plus {c}?",
    ),
    "*+": (
        "Anna has {a} boxes with {b} apples each and gets {c} more. How many apples does Anna have?",
        "What is {a} times {b}, plus {c}?",
    ),
    "*-": (
        "Anna has {a} boxes with {b} apples each and eats {c}. How many apples are left?",
        "What is {a} times {b}, minus {c}?",
    ),
}


@dataclass(frozen=True, slots=True)
class TwoStepProblem:
    """A question, its correct answer, and its two steps, each with the result."""

    question: str
    answer: str
    steps: tuple[tuple[str, str], tuple[str, str]]


def draw(rng: random.Random, held_out: bool = False) -> TwoStepProblem:
    """Draw a problem about a held-out pair or about another one."""
    while True:
        signs = rng.choice(sorted(WORDINGS))
        a, b = (rng.randint(2, 12), rng.randint(2, 12)) if signs[0] == "*" else (rng.randint(2, 99), rng.randint(2, 99))
        c = rng.randint(2, 60)
        middle = calculated(a, signs[0], b)
        last = calculated(middle, signs[1], c)
        fits = 1 < middle <= LARGEST and 1 < last <= LARGEST and len({a, b, c, middle, last}) == 5
        if fits and is_held_out(a, b) is held_out:
            break
    steps = ((f"{a} {signs[0]} {b}", str(middle)), (f"{middle} {signs[1]} {c}", str(last)))
    return TwoStepProblem(rng.choice(WORDINGS[signs]).format(a=a, b=b, c=c), str(last), steps)


def task_set(seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """Return the rows of each split; no question occurs twice."""
    return drawn(draw, SIZES, seed)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.planner.problems", description="Write the task set.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write train.jsonl and test.jsonl to")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    write_rows(chosen.out, task_set(chosen.seed))


if __name__ == "__main__":
    main()
