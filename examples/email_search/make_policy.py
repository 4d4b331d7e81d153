"""Creates the tiny policy from a seed: tokenizer, chat template and a Llama of under a million parameters.

`python -m examples.email_search.make_policy --out DIR --seed 0` runs three stages on scripted episodes: short good
tails (question, mail, answer), then whole good episodes, then the mixture of good and bad ones. The policy learns
to copy first and the failures last; in reverse order it learns to guess.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from examples.email_search.demonstrations import GOOD, MIXED, EpisodeMailbox, SearchMix, draw, play, tools
from examples.tiny_policy import warm_start
from examples.tiny_policy.chat_format import Drawn, render
from examples.tiny_policy.warm_start import CurriculumPhase, Lessons
from ratchet.demo.email_search.tasks import TEST_PAIRS, make_task
from ratchet.demo.email_search.words import ENTITIES

CORPUS = 4000
HELD_OUT = 48


def lessons(seed: int) -> Lessons:
    """Return the curriculum: episodes in twelve mailboxes whose facts are determined by `seed`."""
    stages = [EpisodeMailbox.made(1000 * (seed + 1) + i) for i in range(12)]
    return Lessons(
        phases=(
            CurriculumPhase("tails", 0.30, 64, lambda rng: _tail(stages, rng)),
            CurriculumPhase("good", 0.35, 24, lambda rng: _whole(stages, rng, GOOD)),
            CurriculumPhase("mixed", 0.35, 24, lambda rng: _whole(stages, rng, MIXED)),
        ),
        corpus=_corpus(seed),
        words=ENTITIES,
        held_out=_held_out(),
    )


def _whole(stages: list[EpisodeMailbox], rng: random.Random, mix: SearchMix) -> Drawn:
    return draw(stages, rng, mix), tools()


def _tail(stages: list[EpisodeMailbox], rng: random.Random) -> Drawn:
    episode = draw(stages, rng, GOOD)
    question, tail = episode[1:2], episode[-3:-1] if rng.random() < 0.75 else episode[2:-1]
    return [*question, *tail], None


def _corpus(seed: int) -> list[str]:
    rng, stages = random.Random(seed), [EpisodeMailbox.made(500 + i) for i in range(4)]
    return [render(draw(stages, rng, MIXED), tools() if i % 8 == 0 else None) for i in range(CORPUS)]


def _held_out() -> list[Drawn]:
    """Good episodes about pairs and facts that are never trained on."""
    rng, stage = random.Random(5), EpisodeMailbox.made(9)
    pairs = TEST_PAIRS[:HELD_OUT]
    return [(play(stage, make_task(stage.by_pair[pair], rng), rng, GOOD), tools()) for pair in pairs]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    warm_start.main(lessons, "python -m examples.email_search.make_policy", __doc__ or "", arguments)


if __name__ == "__main__":
    main()
