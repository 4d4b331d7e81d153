"""The second judge: asked about a sample of the groups, beside the first and never instead of it.

Promises that what it says never counts as a score: its verdicts are compared and only their figures kept, its
judge_requests
with a language model are kept for `ratchet judge show`. It holds nobody up: it works in a thread of its own, and a
group that comes while it has enough to do is passed over. Which groups are in the sample depends on their ids alone. A
restart forgets nothing of what it said.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ratchet.store.records import Transcript, Verdict
from ratchet.store.store import Store
from ratchet.store.training.observations import Observation
from ratchet.trainer.controller.judges import Judge, Judgement
from ratchet.trainer.controller.judging.judge_agreement import PairedJudgements

log = logging.getLogger(__name__)

KIND = "second_judge"  # of its observations
_REMEMBERED = 200  # groups
_AHEAD = 8  # groups that wait beside those that it has


class SecondJudge:
    """Hears a sample of an alias's groups; `first` is the version of the judge that it is compared with."""

    def __init__(self, judge: Judge, share: float, store: Store, alias: str, first: str) -> None:
        self._judge = judge
        self._share = share
        self._store = store
        self._alias = alias
        self._versions = {"judge": judge.version, "first_judge": first}
        self._threads = ThreadPoolExecutor(judge.concurrency, thread_name_prefix="second-judge")
        self._asked: dict[str, Future[Judgement]] = {}
        self._first: dict[str, Mapping[str, float]] = {}
        self._heard: deque[PairedJudgements] = deque(self._recall(), maxlen=_REMEMBERED)
        self.name = judge.name

    def offer(self, group_id: str, members: Sequence[Transcript]) -> None:
        """Ask about a group, where it is in the sample and there is room."""
        full = len(self._asked) >= self._judge.concurrency + _AHEAD
        if len(members) > 1 and not full and group_id not in self._asked and in_sample(group_id, self._share):
            self._asked[group_id] = self._threads.submit(self._judge.judge, group_id, members)

    def compare(self, group_id: str, verdicts: Sequence[Verdict]) -> None:
        """Take what the first judge said; a failure of it leaves nothing to compare with."""
        if group_id not in self._asked:
            return
        scores = _scores(verdicts)
        if scores is None:
            self._asked.pop(group_id).cancel()
        else:
            self._first[group_id] = scores

    def heard(self) -> tuple[PairedJudgements, ...]:
        """Return what both said of the newest groups, oldest first; keeps the judge_requests of those that are new."""
        for group_id in [name for name in self._first if self._asked[name].done()]:
            judgement = self._asked.pop(group_id).result()
            self._store.groups.record_judge_requests(judgement.judge_requests)
            heard = PairedJudgements(group_id, self._first.pop(group_id), _scores(judgement.verdicts))
            self._store.observations.add(self._alias, KIND, group_id, {**self._versions, **_figures(heard)})
            self._heard.append(heard)
        return tuple(self._heard)

    def _recall(self) -> list[PairedJudgements]:
        """Return what this judge said before, beside the same first one."""
        known = self._store.observations.newest(self._alias, KIND, 2 * _REMEMBERED)
        return [_heard(one) for one in known if self._versions.items() <= one.content.items()]

    def close(self) -> None:
        """Ask no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._judge.close()


def in_sample(group_id: str, share: float) -> bool:
    """Whether a group is in the sample; of two shares, the larger one's sample holds the smaller one's."""
    return int.from_bytes(hashlib.sha256(group_id.encode()).digest()[:8]) < share * 2**64


def _figures(heard: PairedJudgements) -> dict[str, list[float] | None]:
    """Return the scores of both, member by member, without saying whose they are."""
    second = None if heard.second is None else [heard.second[name] for name in heard.first]
    return {"first": list(heard.first.values()), "second": second}


def _heard(noted: Observation) -> PairedJudgements:
    first, second = (
        None if scores is None else {str(place): score for place, score in enumerate(scores)}
        for scores in (noted.content["first"], noted.content["second"])
    )
    return PairedJudgements(noted.subject, first or {}, second)


def _scores(verdicts: Sequence[Verdict]) -> dict[str, float] | None:
    """Return the scores by trajectory; None where one failed."""
    scores = {verdict.trajectory_id: verdict.score for verdict in verdicts if verdict.score is not None}
    return scores if len(scores) == len(verdicts) else None
