"""Creates the tiny policy of the math agent and of `examples.planner` from a seed.

`python -m examples.math.make_policy --out DIR --seed 0` runs three stages on scripted episodes: short good tails, then
whole good episodes, then the mixture of good and bad ones. A number up to 200 is one token, so that it can be copied.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from examples.math.demonstrations import GOOD, MIXED, NUMBERS, drawn, tail
from examples.planner.demonstrations import planned, worked
from examples.tiny_policy import warm_start
from examples.tiny_policy.chat_format import Drawn, render
from examples.tiny_policy.warm_start import CurriculumPhase, Lessons, Shape

CORPUS = 3000
HELD_OUT = 48
PATTERN = r"[A-Za-z_]+|[0-9]+|[^A-Za-z_0-9]+"
SIGNS = frozenset({" + ", " - ", " * "})


def lessons(seed: int) -> Lessons:
    """Return the curriculum."""
    rng, held_out_rng = random.Random(f"{seed} corpus"), random.Random(5)
    return Lessons(
        phases=(
            CurriculumPhase("tails", 360, 48, _tail),
            CurriculumPhase("good", 225, 20, lambda rng: _episode(rng, good=True)),
            CurriculumPhase("mixed", 315, 20, lambda rng: _episode(rng, good=False)),
        ),
        corpus=[render(*_episode(rng, good=False)) for _ in range(CORPUS)],
        words=NUMBERS | SIGNS,
        held_out=[_held_out(held_out_rng, number) for number in range(HELD_OUT)],
        pattern=PATTERN,
        shape=Shape(hidden=96, layers=3, heads=3),
    )


def _episode(rng: random.Random, good: bool) -> Drawn:
    """Draw an episode: half of the time of the math agent, else of the planner or its worker."""
    if rng.random() < 0.5:
        return drawn(rng, GOOD if good else MIXED)
    return planned(rng, good) if rng.random() < 0.7 else worked(rng, good)


def _tail(rng: random.Random) -> Drawn:
    """A good episode without system prompt, tools and reminder."""
    messages, _ = tail(rng) if rng.random() < 0.5 else planned(rng, good=True)
    return [message for message in messages if message["role"] != "system"], None


def _held_out(rng: random.Random, number: int) -> Drawn:
    return planned(rng, good=True, held_out=True) if number % 2 else drawn(rng, GOOD, held_out=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    warm_start.main(lessons, "python -m examples.math.make_policy", __doc__ or "", arguments)


if __name__ == "__main__":
    main()
