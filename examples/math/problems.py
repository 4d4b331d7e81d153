"""Problems of one step, in words, each with one correct answer, and their task set.

`python -m examples.math.problems --out examples/math/tasks` writes `train.jsonl` and `test.jsonl`, one `{"id",
"question", "answer"}` per line: a Hugging Face data set. The pairs of numbers of the test set are held out: neither
the training tasks nor the tiny policy's warm start use them.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

SIZES = {"train": 300, "test": 100}
LARGEST = 200  # no number in a problem or an answer is larger
WORDINGS = {
    "+": (
        "What is {a} plus {b}?",
        "Anna has {a} apples and gets {b} more. How many apples does Anna have?",
        "Add {a} and {b}.",
    ),
    "-": (
        "What is {a} minus {b}?",
        "Anna has {a} apples and eats {b}. How many apples are left?",
        "Take {b} from {a}.",
    ),
    "*": (
        "What is {a} times {b}?",
        "Anna has {a} boxes with {b} apples each. How many apples does Anna have?",
        "Multiply {a} by {b}.",
    ),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, its correct answer, and the expression for it."""

    question: str
    answer: str
    expression: str


def calculated(left: int, sign: str, right: int) -> int:
    """Return the value of the expression."""
    return {"+": left + right, "-": left - right, "*": left * right}[sign]


def is_held_out(a: int, b: int) -> bool:
    """Return whether this pair is reserved for the test set: one pair in five."""
    return (31 * a + 17 * b) % 5 == 0


class Question(Protocol):
    """A question and its correct answer."""

    @property
    def question(self) -> str: ...

    @property
    def answer(self) -> str: ...


class Draw(Protocol):
    """Draws one question of a split."""

    def __call__(self, rng: random.Random, held_out: bool) -> Question: ...


def draw(rng: random.Random, held_out: bool = False) -> Problem:
    """Draw a problem about a held-out pair or about another one."""
    while True:
        sign = rng.choice(sorted(WORDINGS))
        a, b = (rng.randint(2, 14), rng.randint(2, 14)) if sign == "*" else (rng.randint(2, 99), rng.randint(2, 99))
        a, b = (max(a, b), min(a, b)) if sign == "-" else (a, b)
        if is_held_out(a, b) is held_out and a != b:
            break
    question = rng.choice(WORDINGS[sign]).format(a=a, b=b)
    return Problem(question, str(calculated(a, sign, b)), f"{a} {sign} {b}")


def task_set(seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """Return the rows of each split; no question occurs twice."""
    return drawn(draw, SIZES, seed)


def drawn(draw: Draw, sizes: Mapping[str, int], seed: int) -> dict[str, list[dict[str, str]]]:
    """Return `sizes` rows of each split, drawn by `draw`; no question occurs twice."""
    splits = {}
    for split, size in sizes.items():
        rng, answers = random.Random(f"{seed} {split}"), dict[str, str]()
        while len(answers) < size:
            problem = draw(rng, held_out=split == "test")
            answers[problem.question] = problem.answer
        splits[split] = [
            {"id": f"{split}/{number}", "question": question, "answer": answer}
            for number, (question, answer) in enumerate(answers.items())
        ]
    return splits


def write_rows(folder: Path, splits: Mapping[str, Sequence[Mapping[str, str]]]) -> None:
    """Write a task set, one file per split."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.math.problems", description="Write the task set.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write train.jsonl and test.jsonl to")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    write_rows(chosen.out, task_set(chosen.seed))


if __name__ == "__main__":
    main()
