"""Creates the tiny policy from a seed: tokenizer, chat template and a Llama of under a million parameters.

`python -m examples.email_search.make_policy --out DIR --seed 0` runs four phases on scripted episodes: short good tails
(question, mail, answer), whole good episodes, a mixture of good and bad ones, then a mixture in which most episodes
answer after the search without reading the mail. The policy learns to copy first and the failures last; in reverse
order it learns to guess. Its likeliest behaviour is wrong at the end, and the right one is rare.

The result is checked on validation tasks: see `acceptance`. The held-out tasks decide nothing here.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import asdict

from examples.email_search.acceptance import measured
from examples.email_search.demonstrations import GOOD, HASTY, MIXED, EpisodeMailbox, SearchMix, draw, play, tools
from examples.tiny_policy import warm_start
from examples.tiny_policy.chat_format import Drawn, render
from examples.tiny_policy.warm_start import CurriculumPhase, Lessons
from ratchet.demo.email_search.mailbox import ENTITIES
from ratchet.demo.email_search.tasks import VALIDATION_PAIRS, make_task

CORPUS = 4000
TAILS_REHEARSED = 0.2  # of the last phase


def lessons(seed: int) -> Lessons:
    """Return the curriculum: episodes in twelve mailboxes whose facts are determined by `seed`."""
    stages = [EpisodeMailbox.made(1000 * (seed + 1) + i) for i in range(12)]
    return Lessons(
        phases=(
            CurriculumPhase("tails", 390, 64, lambda rng: _tail(stages, rng)),
            CurriculumPhase("good", 455, 24, lambda rng: _whole(stages, rng, GOOD)),
            CurriculumPhase("mixed", 455, 24, lambda rng: _whole(stages, rng, MIXED)),
            CurriculumPhase("hasty", 200, 24, lambda rng: _hasty(stages, rng), learning_rate=1.5e-3),
        ),
        corpus=_corpus(seed),
        words=ENTITIES,
        held_out=_held_out(),
    )


def _whole(stages: list[EpisodeMailbox], rng: random.Random, mix: SearchMix) -> Drawn:
    return draw(stages, rng, mix), tools()


def _hasty(stages: list[EpisodeMailbox], rng: random.Random) -> Drawn:
    """A hasty episode, or sometimes a tail: copying stays exact although few episodes of this phase read a mail."""
    return _tail(stages, rng) if rng.random() < TAILS_REHEARSED else _whole(stages, rng, HASTY)


def _tail(stages: list[EpisodeMailbox], rng: random.Random) -> Drawn:
    episode = draw(stages, rng, GOOD)
    question, tail = episode[1:2], episode[-3:-1] if rng.random() < 0.75 else episode[2:-1]
    return [*question, *tail], None


def _corpus(seed: int) -> list[str]:
    rng, stages = random.Random(seed), [EpisodeMailbox.made(500 + i) for i in range(4)]
    return [render(draw(stages, rng, MIXED), tools() if i % 8 == 0 else None) for i in range(CORPUS)]


def _held_out() -> list[Drawn]:
    """Good episodes about the validation pairs: neither they nor their facts are in any phase."""
    rng, stage = random.Random(5), EpisodeMailbox.made(9)
    tasks = (make_task(stage.by_pair[pair], rng) for pair in VALIDATION_PAIRS)
    return [(play(stage, task, rng, GOOD), tools()) for task in tasks]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if the policy is not accepted."""
    folder = warm_start.main(lessons, "python -m examples.email_search.make_policy", __doc__ or "", arguments)
    figures = measured(folder)
    print("validation: " + " ".join(f"{name}={value:.3f}" for name, value in asdict(figures).items()))
    for sentence in figures.failures():
        print(f"not accepted: {sentence}; try another --seed", file=sys.stderr)
    return 1 if figures.failures() else 0


if __name__ == "__main__":
    sys.exit(main())
