"""A second judge's opinion on a ramp that the first judge prefers: does it see the gain too?

A judge that is being fooled prefers what fools it; another judge does not. Pairs of a ramp's and a live trajectory,
of the same task if possible, are judged together, so relative judges work as well. Runs in its own thread and writes
nothing to the store.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from ratchet.store.errors import RecordDamaged
from ratchet.store.records import PastScore, Transcript
from ratchet.trainer.controller.judges import Judge
from ratchet.trainer.controller.judges.both_orders import judge_in_both_orders
from ratchet.trainer.statistics.confidence_sequence import MeanDifference

log = logging.getLogger(__name__)

_Z = statistics.NormalDist().inv_cdf(0.975)

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class SecondOpinion:
    """The mean difference (ramp - live) in the second judge's own units, with its 95% interval."""

    judge: str
    judge_version: str
    pairs: int
    failures: int
    mean: float
    low: float
    high: float

    def evidence(self) -> dict[str, Any]:
        """Return it in the form of a decision's evidence."""
        return {"second_judge": asdict(self)}

    def blocking_reason(self, first: MeanDifference) -> str | None:
        """Return why the promotion needs approval; None if the second judge agrees with `first`."""
        described = f"second judge {self.judge}: difference {self.mean:+.3f} ({self.low:+.3f} to {self.high:+.3f})"
        if self.pairs < 2 or self.failures > self.pairs:
            return f"second judge {self.judge} failed on {self.failures} of {self.failures + self.pairs} pairs"
        if self.high < 0:
            return f"{described}: it finds the new version worse"
        if first.low > 0 and self.mean <= 0:
            return f"{described}: it does not see the gain of {first.value:+.3f}"
        return None


class SecondOpinionRunner:
    """Asks the second judge about one ramp after the other, in its own thread."""

    def __init__(self, judge: Judge, max_pairs: int, read_transcript: Callable[[str], Transcript]) -> None:
        self._judge = judge
        self._max_pairs = max_pairs
        self._read_transcript = read_transcript
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="second_opinion")
        self._pending: tuple[int, Future[SecondOpinion]] | None = None

    def opinion_on(self, version: int, ramp: Sequence[PastScore], live: Sequence[PastScore]) -> SecondOpinion | None:
        """Return the opinion on a version; None until it is known. Raises what reading the store raises."""
        if self._pending is None or self._pending[0] != version:
            pairs = pair_up(ramp, live, self._max_pairs)
            self._pending = version, self._thread.submit(judge_pairs, self._judge, pairs, self._read_transcript)
        _, opinion = self._pending
        if not opinion.done():
            return None
        self._pending = None
        return opinion.result()

    def close(self) -> None:
        """Stop asking, and close the judge."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._judge.close()


def pair_up(ramp: Sequence[PastScore], live: Sequence[PastScore], max_pairs: int) -> list[Pair]:
    """Return at most `max_pairs` (ramp, live) trajectory ids, newest first, of the same cohort if possible."""
    free: dict[str, list[PastScore]] = {}
    for scored in live:
        free.setdefault(scored.cohort, []).append(scored)
    newest = list(reversed(ramp))
    pairs = [(one.trajectory_id, free[one.cohort].pop().trajectory_id) for one in newest if free.get(one.cohort)]
    if len(pairs) < max_pairs:
        paired = {trajectory_id for trajectory_id, _ in pairs}
        unpaired = [one.trajectory_id for one in newest if one.trajectory_id not in paired]
        others = [scored.trajectory_id for rest in free.values() for scored in rest]
        pairs += list(zip(unpaired, others, strict=False))
    return pairs[:max_pairs]


def judge_pairs(judge: Judge, pairs: Sequence[Pair], read_transcript: Callable[[str], Transcript]) -> SecondOpinion:
    """Return the judge's opinion on all pairs. Blocks until every pair is judged."""
    with ThreadPoolExecutor(judge.concurrency, thread_name_prefix="second_judge") as threads:
        judged = list(threads.map(lambda pair: _scores(judge, pair, read_transcript), pairs))
    differences = list(_differences(judged))
    mean = statistics.fmean(differences) if differences else 0.0
    reach = _Z * statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    failures = len(judged) - len(differences)
    return SecondOpinion(judge.name, judge.version, len(differences), failures, mean, mean - reach, mean + reach)


def _scores(judge: Judge, pair: Pair, read_transcript: Callable[[str], Transcript]) -> list[float | None]:
    """Return the two scores of a pair; none for a pair that is damaged in the store."""
    try:
        read = [read_transcript(name) for name in pair]
    except RecordDamaged as damaged:
        log.warning("event=pair_not_compared reason=%r", str(damaged))
        return [None, None]
    return [verdict.score for verdict in judge_in_both_orders(judge, read).verdicts]


def _differences(scores: Sequence[Sequence[float | None]]) -> Iterator[float]:
    for ramp, live in scores:
        if ramp is not None and live is not None:
            yield ramp - live
