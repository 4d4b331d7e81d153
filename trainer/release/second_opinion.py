"""A second judge's opinion of a canary that the first judge likes: does it see the gain too?

A judge that is being fooled likes what fools it; another one does not. Pairs of a canary's and a live trajectory, of
the same task where there are such, are judged together, so that relative judges will do. A judge that takes its time
holds nobody up. Writes nothing down.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from ratchet.store.records import PastScore, Transcript
from ratchet.trainer.controller.judges import Judge
from ratchet.trainer.controller.judges.both_orders import judge_in_both_orders
from ratchet.trainer.statistics.sequential_test import Difference

_Z = statistics.NormalDist().inv_cdf(0.975)

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class SecondOpinion:
    """The mean difference (canary - live) in the second judge's own units, with its 95% interval."""

    judge: str
    judge_version: str
    pairs: int
    failures: int
    mean: float
    low: float
    high: float

    def evidence(self) -> dict[str, Any]:
        """Return it as a decision keeps it."""
        return {"second_judge": asdict(self)}

    def objection(self, first: Difference) -> str | None:
        """Return why the promotion has to wait; None where the second judge agrees."""
        told = f"second judge {self.judge}: difference {self.mean:+.3f} ({self.low:+.3f} to {self.high:+.3f})"
        if self.pairs < 2 or self.failures > self.pairs:
            return f"second judge {self.judge} failed on {self.failures} of {self.failures + self.pairs} pairs"
        if self.high < 0:
            return f"{told}: it finds the canary worse"
        if first.low > 0 and self.mean <= 0:
            return f"{told}: it does not see the gain of {first.value:+.3f}"
        return None


class SecondOpinions:
    """Forms an opinion of one canary after the other, in a thread of its own."""

    def __init__(self, judge: Judge, most: int, read: Callable[[str], Transcript]) -> None:
        self._judge = judge
        self._most = most
        self._read = read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="second_opinion")
        self._asked: tuple[int, Future[SecondOpinion]] | None = None

    def of(self, version: int, canary: Sequence[PastScore], live: Sequence[PastScore]) -> SecondOpinion | None:
        """Return the opinion of a version once it is formed; None until then. Raises what reading the store raises."""
        if self._asked is None or self._asked[0] != version:
            pairs = pair_up(canary, live, self._most)
            self._asked = version, self._thread.submit(ask, self._judge, pairs, self._read)
        _, answer = self._asked
        if not answer.done():
            return None
        self._asked = None
        return answer.result()

    def close(self) -> None:
        """Ask no more, and let go of the judge."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._judge.close()


def pair_up(canary: Sequence[PastScore], live: Sequence[PastScore], most: int) -> list[Pair]:
    """Return at most `most` pairs of (canary, live) trajectories, the newest first, of the same cohort if possible."""
    free: dict[str, list[PastScore]] = {}
    for scored in live:
        free.setdefault(scored.cohort, []).append(scored)
    newest = list(reversed(canary))
    pairs = [(one.trajectory_id, free[one.cohort].pop().trajectory_id) for one in newest if free.get(one.cohort)]
    if len(pairs) < most:
        paired = {name for name, _ in pairs}
        left = [scored.trajectory_id for rest in free.values() for scored in rest]
        pairs += list(zip([o.trajectory_id for o in newest if o.trajectory_id not in paired], left, strict=False))
    return pairs[:most]


def ask(judge: Judge, pairs: Sequence[Pair], read: Callable[[str], Transcript]) -> SecondOpinion:
    """Have every pair judged; takes as long as the judge takes."""
    with ThreadPoolExecutor(judge.concurrency, thread_name_prefix="second_judge") as threads:
        judged = list(
            threads.map(lambda pair: judge_in_both_orders(judge, [read(name) for name in pair]).verdicts, pairs)
        )
    found = list(_differences([[verdict.score for verdict in verdicts] for verdicts in judged]))
    mean = statistics.fmean(found) if found else 0.0
    reach = _Z * statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0
    failures = len(judged) - len(found)
    return SecondOpinion(judge.name, judge.version, len(found), failures, mean, mean - reach, mean + reach)


def _differences(scores: Sequence[Sequence[float | None]]) -> Iterator[float]:
    for canary, live in scores:
        if canary is not None and live is not None:
            yield canary - live
