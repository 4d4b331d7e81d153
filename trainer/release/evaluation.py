"""Evaluations before a release: on held-out tasks, with a second opinion, and of prompt versions."""

from __future__ import annotations

import logging
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, asdict, dataclass
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from ratchet.store.errors import RecordDamaged
from ratchet.store.reasons import DropReason
from ratchet.store.records import Call, PastScore, Policy, Transcript
from ratchet.store.statistics import interval
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import VllmServer, replicas_that_serve
from ratchet.trainer.background_work import BackgroundWork, no_change
from ratchet.trainer.errors import EngineError, EngineUnreachable, SettingError, TrainerError, TuningError
from ratchet.trainer.judges.judgement import Judge
from ratchet.trainer.judges.kinds.combined import judge_in_both_orders
from ratchet.trainer.judges.make_judge import make_judge
from ratchet.trainer.release.invariants import KIND as INVARIANTS
from ratchet.trainer.release.invariants import (
    InvariantsCheck,
    InvariantsResult,
    RecordedPrompt,
    has_sampling_parameters,
    sampling_of,
)
from ratchet.trainer.settings.trainer_settings import ReleaseSettings, TrainerSettings


def version_name(policy: Policy) -> str:
    """Return `alias@version`. vLLM may serve the version under another version's name (`served_name`)."""
    return f"{policy.alias}@{policy.version}"


def is_trained(policy: Policy) -> bool:
    """Return whether a round made the version. Otherwise it is another version's adapter with another prompt."""
    return policy.round_id is not None


# The result of a paired evaluation: a candidate's answers and the live version's, judged as one group per prompt.

MIN_PROMPTS = 5
PROMPT_SET = "prompt_set"  # key of a decision's evidence

Sides = tuple[Sequence[Transcript], Sequence[Transcript]]  # the candidate's and the live version's answers to a prompt


@dataclass(frozen=True, slots=True)
class PairedEvaluation:
    """The mean over prompts of (candidate - live) in units of the score, with its 95% interval."""

    prompts: int
    unjudged: int  # prompts (of a workflow: attempts) that the judge failed on
    candidate: float
    live: float
    difference: float
    low: float
    high: float
    what: str = "prompts"

    @property
    def worse(self) -> bool:
        return self.high < 0

    def describe(self) -> str:
        return (
            f"on {self.prompts} held-out {self.what} {self.candidate:.3f} against {self.live:.3f}: "
            f"difference {self.difference:+.3f} ({self.low:+.3f} to {self.high:+.3f})"
        )


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The result by the judge, and by the second judge on the same answers.

    first       None if there was too little to compare
    run         the tuner's run, if a workflow played the tasks
    prompt_set  a hash of the prompts, equal if they were the same ones
    changed     whether the prompts differ from those of the previous evaluation
    """

    first: PairedEvaluation | None
    second: PairedEvaluation | None = None
    second_judge: str = ""
    run: str | None = None
    prompt_set: str = ""
    changed: bool = False

    @property
    def broken(self) -> bool:
        """Whether the candidate is worse than the live version."""
        return self.first is not None and self.first.worse

    def evidence(self) -> dict[str, Any]:
        evidence: dict[str, Any] = {"evaluation": asdict(self.first)} if self.first else {}
        if self.second:
            evidence["second_evaluation"] = {"judge": self.second_judge} | asdict(self.second)
        if self.first and self.prompt_set:
            evidence |= {PROMPT_SET: self.prompt_set, "prompt_set_changed": self.changed}
        return evidence | ({"run": self.run} if self.run else {})

    def describe(self) -> str:
        """Return the judge's result as one clause; "" if there was too little to compare."""
        changed = " (other prompts than in the previous evaluation)" if self.changed else ""
        return f"{self.first.describe()}{changed}" if self.first else ""

    def blocking_reason(self, max_gain: float | None) -> str | None:
        """Return why the candidate needs approval before it serves; None if it does not."""
        if self.first is None:
            return None
        reasons: list[str | None] = []
        if max_gain is not None and self.first.difference > max_gain:
            reasons.append(f"the gain exceeds max_gain {max_gain:g}: {self.first.describe()}")
        if self.second_judge:
            reasons += [second_judge_reason(self.second_judge, self.second, self.first.difference, self.first.low)]
        return "; ".join(filter(None, reasons)) or None


def second_judge_reason(judge: str, second: PairedEvaluation | None, first: float, low: float) -> str | None:
    """Return why a second judge's result needs a person's approval; None if it does not. The first judge sees a
    difference of `first`, at least `low`.
    """
    if second is None:
        return f"second judge {judge} failed on too many of the answers"
    described = f"second judge {judge} {second.describe()}"
    if second.worse:
        return f"{described}: it finds the new version worse"
    if low > 0 and second.difference <= 0:
        return f"{described}: it does not see the gain of {first:+.3f}"
    return None


def summarize_pairs(
    scored: Sequence[tuple[float, float]], unjudged: int, what: str = "prompts"
) -> PairedEvaluation | None:
    """Return the evaluation of (candidate, live) mean scores by prompt; None for fewer than `MIN_PROMPTS`."""
    if len(scored) < MIN_PROMPTS:
        return None
    gains = [candidate - live for candidate, live in scored]
    scores = [score for pair in scored for score in pair]
    low, high = interval(gains, max(scores) - min(scores) or 1.0)
    candidate, live = (statistics.fmean(side) for side in zip(*scored, strict=True))
    return PairedEvaluation(len(scored), unjudged, candidate, live, statistics.fmean(gains), low, high, what)


def compare_with_judge(judge: Judge, answers: Sequence[Sides], what: str = "prompts") -> PairedEvaluation | None:
    """Judge both sides of each prompt as one group; return None for fewer than `MIN_PROMPTS` judged prompts."""
    with ThreadPoolExecutor(judge.concurrency, thread_name_prefix="evaluation_judge") as threads:
        scored = [pair for pair in threads.map(lambda sides: _mean_scores(judge, sides), answers) if pair is not None]
    return summarize_pairs(scored, len(answers) - len(scored), what)


def _mean_scores(judge: Judge, sides: Sides) -> tuple[float, float] | None:
    members = [*sides[0], *sides[1]]
    scores = [verdict.score for verdict in judge_in_both_orders(judge, members).verdicts if verdict.score is not None]
    if len(scores) < len(members):
        return None
    return statistics.fmean(scores[: len(sides[0])]), statistics.fmean(scores[len(sides[0]) :])


# A second judge's opinion on a ramp that the first judge prefers: does it see the gain too?
#
# A judge that is being fooled prefers what fools it; another judge does not. Pairs of a ramp's and a live trajectory,
# of the same task if possible, are judged together, so relative judges work as well. Runs in its own thread and writes
# nothing to the store.

log = logging.getLogger(__name__)

Pair = tuple[str, str]


class SecondOpinion:
    """Asks the second judge about one ramp after the other, in a thread of its own."""

    def __init__(self, judge: Judge, max_pairs: int, read_transcript: Callable[[str], Transcript]) -> None:
        self.judge = judge
        self._max_pairs = max_pairs
        self._read_transcript = read_transcript
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="second_opinion")
        self._pending: tuple[int, Future[PairedEvaluation | None]] | None = None

    def about(
        self, version: int, ramp: Sequence[PastScore], live: Sequence[PastScore]
    ) -> Future[PairedEvaluation | None] | None:
        """Return the comparison of a version with the live one, which is done; None until it is."""
        if self._pending is None or self._pending[0] != version:
            pairs = pair_up(ramp, live, self._max_pairs)
            self._pending = version, self._thread.submit(compare_pairs, self.judge, pairs, self._read_transcript)
        _, opinion = self._pending
        if not opinion.done():
            return None
        self._pending = None
        return opinion

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.judge.close()


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


def compare_pairs(
    judge: Judge, pairs: Sequence[Pair], read_transcript: Callable[[str], Transcript]
) -> PairedEvaluation | None:
    """Return the judge's comparison of both sides of all pairs; None if it fails on too many, or they are damaged."""
    sides: list[Sides] = []
    for ramp, live in pairs:
        try:
            sides.append(([read_transcript(ramp)], [read_transcript(live)]))
        except RecordDamaged as damaged:
            log.warning("event=pair_not_compared reason=%r", str(damaged))
    found = compare_with_judge(judge, sides, "pairs")
    return found if found is not None and 2 * found.prompts >= len(pairs) else None


# Evaluations in the background: a candidate is evaluated while the trainer collects, groups and judges.
#
# One evaluation at a time, in its own thread. Promises: a result is in the store before anybody decides on it, so a
# trainer that is killed continues from there or evaluates again, and no result is used twice; an evaluation that fails
# raises an alarm and is repeated, and never counts as passed. Decides nothing.

KIND = "evaluation"  # of the observations that hold the results
_RETRY_SECONDS = 60.0  # after a failure


class Result(Protocol):
    """What an evaluation found: a dataclass that msgspec can write and read again."""

    @property
    def broken(self) -> bool:
        """Whether the candidate is rejected."""

    def evidence(self) -> dict[str, Any]:
        """Return it in the form of a decision's evidence."""

    def describe(self) -> str:
        """Return it as one clause, "" if nothing is known."""

    def blocking_reason(self, max_gain: float | None) -> str | None:
        """Return why the candidate needs approval before it serves; None if it does not."""


ResultT = TypeVar("ResultT", bound=Result)
ResultT_co = TypeVar("ResultT_co", bound=Result, covariant=True)


class Evaluator(Protocol[ResultT_co]):
    """Compares a candidate with the live version. Blocks."""

    def evaluate(self, candidate: Policy, live: Policy, check: Callable[[], None]) -> ResultT_co:
        """Return the result; call `check` regularly, which raises if the evaluation has to stop.

        Raises EngineError, TuningError, TrainerError, StoreError.
        """

    def close(self) -> None:
        """Close what it uses."""


# Arguments: the store, the alias, the settings, the judge and the second judge. The tuner's evaluator is passed in
# because the trainer cannot import the tuner.
MakeWorkflowEvaluator = Callable[[Store, str, ReleaseSettings, Judge, Judge | None], Evaluator[EvaluationResult]]


def make_checks(
    settings: TrainerSettings,
    store: Store,
    replicas: Sequence[VllmServer],
    make_workflow_evaluator: MakeWorkflowEvaluator | None = None,
) -> list[EvaluationRunner[Any]]:
    """Return the checks of a proven candidate before it serves users, in order, as the settings name them: the
    invariants, then held-out tasks, which a workflow plays or which are recorded prompts.

    Raises WorkflowError, TaskSetError, JudgeError; SettingError if the settings name a workflow and the program that
    starts the trainer passes no evaluator for workflows.
    """
    release, alias = settings.release, settings.model
    checks: list[EvaluationRunner[Any]] = []
    if release.policy != "immediate" and release.invariant_prompts:
        invariants = InvariantsCheck(store, replicas, alias=alias, prompts=release.invariant_prompts)
        checks.append(EvaluationRunner(store, alias, invariants, InvariantsResult, INVARIANTS))
    if release.workflow is None and not release.held_out_share:
        return checks
    judge, second = make_judge(settings.judge, os.environ), make_second_judge(settings)
    evaluator: Evaluator[EvaluationResult]
    if release.workflow is None:
        evaluator = PromptEvaluator(
            store, replicas, judge, second,
            alias=alias, prompts=release.evaluation_prompts, samples=release.evaluation_samples,
        )  # fmt: skip
    elif make_workflow_evaluator is None:
        raise SettingError("trainer.release.workflow needs the tuner: start the trainer with `ratchet trainer`")
    else:
        evaluator = make_workflow_evaluator(store, alias, release, judge, second)
    return [*checks, EvaluationRunner(store, alias, evaluator, EvaluationResult, KIND)]


def make_second_judge(settings: TrainerSettings) -> Judge | None:
    """Return the second judge of releases, else of the sentinel; None if the settings name neither."""
    spec = settings.release.second_judge or settings.sentinel.second_judge
    return make_judge(spec, os.environ) if spec else None


class EvaluationRunner(Generic[ResultT]):
    """Runs the evaluations of one alias and kind, which names their results in the store and their alarm."""

    def __init__(
        self,
        store: Store,
        alias: str,
        evaluator: Evaluator[ResultT],
        result: type[ResultT],
        kind: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._alias = alias
        self._evaluator = evaluator
        self._result = result
        self.kind = kind
        self._clock = clock
        self._work = BackgroundWork("evaluation")
        self._stop = threading.Event()
        self._retry_at = 0.0

    @property
    def is_running(self) -> bool:
        """Whether `result_for` would return None: an evaluation runs, or waits to be repeated."""
        return not self._work.wait(0.0) or self._clock() < self._retry_at

    def result_for(self, candidate: Policy, live: Policy) -> ResultT | None:
        """Return the result of a candidate beside the live version; None while it is evaluated.

        Raises EngineUnreachable, and what the store raises; calling again is safe.
        """
        subject = f"{version_name(candidate)} against {version_name(live)}"
        if self.is_running:
            return None
        done = self._work.what
        try:
            self._work.collect()
        except BaseException as error:  # noqa: BLE001  raised again unless the evaluation is repeated
            if done == subject:
                self._handle_failure(error, subject)
                return None
        known = self._store.observations.latest(self._alias, self.kind).get(subject)
        if known is not None:
            self._store.alarms.clear(self._alarm)
            return msgspec.convert(known.content, self._result)
        self._work.start(subject, lambda: self._evaluate(candidate, live, subject), no_change)
        log.info("event=%s_started policy=%s against=%s", self.kind, version_name(candidate), version_name(live))
        return None

    def close(self) -> None:
        """Stop the running evaluation; it is repeated after the next start."""
        self._stop.set()
        self._work.close()
        self._evaluator.close()

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise TrainerError("the trainer is stopping")

    def _evaluate(self, candidate: Policy, live: Policy, subject: str) -> None:
        result = self._evaluator.evaluate(candidate, live, self._check_stop)
        self._store.observations.add(self._alias, self.kind, subject, msgspec.to_builtins(result))
        described = result.describe() or "too little to compare"
        log.info("event=%s_done policy=%s result=%r", self.kind, version_name(candidate), described)

    def _handle_failure(self, error: BaseException, subject: str) -> None:
        """Raise an alarm and schedule a retry. Raises `error` if it is not a failure of the evaluation."""
        if isinstance(error, EngineUnreachable) or not isinstance(error, EngineError | TuningError):
            raise error
        self._retry_at = self._clock() + _RETRY_SECONDS
        reason = f"{self.kind} of {subject} failed: {error}; next try in {_RETRY_SECONDS:g} s, nothing is promoted"
        self._store.alarms.raise_(self._alarm, reason)
        log.warning("event=%s_failed reason=%r", self.kind, reason)

    @property
    def _alarm(self) -> str:
        return f"{self.kind}:{self._alias}"


# Evaluation on held-out prompts: a candidate and the live version answer the same prompts, judged in pairs.
#
# A fixed share of all tasks, by a hash of their key, is held out: these tasks are served and recorded as usual, but
# never trained or judged for training. The first one-call trajectory of such a task is a prompt. The set consists of
# the first tasks that arrived, so it stays the same from version to version once it is full; if it changed, the result
# says so.
#
# A version's own prompt is substituted as the proxy does it; judges see the agent's messages, as for live traffic.
# Requests go to vLLM directly, and only the figures are recorded. The second judge, if there is one, sees the same
# answers. For tasks that take more than one call, `ratchet.tuner.selection` runs a workflow instead.

_MAX_DECISIONS = 50  # newest decisions that are searched for the previous prompt set
_CONCURRENCY = 8  # prompts


@dataclass
class PromptEvaluator:
    """Evaluates candidates of one alias on its held-out prompts. Blocks while vLLM and the judges work."""

    store: Store
    replicas: Sequence[VllmServer]
    judge: Judge
    second: Judge | None = None
    _: KW_ONLY
    alias: str
    prompts: int
    samples: int

    def close(self) -> None:
        self.judge.close()
        if self.second is not None:
            self.second.close()

    def evaluate(self, candidate: Policy, live: Policy, check: Callable[[], None]) -> EvaluationResult:
        """Return the paired comparison; its `first` is None for too few held-out prompts that can be judged.

        Raises EngineUnreachable, AdapterRefused, and whatever `check` raises.
        """
        names = self.store.trajectories.held_out_candidates(self.alias, DropReason.HELD_OUT, self.prompts)
        read = self.store.trajectories.readable(names)
        prompts = [recorded for recorded in read if has_sampling_parameters(recorded.calls[0])]
        replicas = replicas_that_serve(self.replicas, {candidate.served_name, live.served_name})

        def ask(place: int) -> Sides:
            return self._answer(replicas[place % len(replicas)], prompts[place], candidate, live, check)

        with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="evaluation") as threads:
            answers = list(threads.map(ask, range(len(prompts))))
        first = compare_with_judge(self.judge, answers)
        prompt_set, changed = self._hash_prompts([one.trajectory.id for one in prompts])
        if first is None or self.second is None:
            return EvaluationResult(first, prompt_set=prompt_set, changed=changed)
        second = compare_with_judge(self.second, answers)
        return EvaluationResult(first, second, self.second.name, prompt_set=prompt_set, changed=changed)

    def _hash_prompts(self, names: Sequence[str]) -> tuple[str, bool]:
        """Return a hash of the prompts, and whether it differs from that of the previous evaluation."""
        now = blake2b("\0".join(sorted(names)).encode(), digest_size=8).hexdigest()
        decisions = self.store.decisions.decisions_of(self.alias, limit=_MAX_DECISIONS)
        before = next((value for one in decisions if (value := one.evidence.get(PROMPT_SET))), now)
        if before != now:
            log.warning("event=evaluation_prompts_changed alias=%s prompts=%d", self.alias, len(names))
        return now, before != now

    def _answer(
        self,
        replica: VllmServer,
        recorded: Transcript,
        candidate: Policy,
        live: Policy,
        check: Callable[[], None],
    ) -> Sides:
        """Return the candidate's answers to a recorded prompt, and as many of the live version."""
        check()
        call = recorded.calls[0]
        messages = self.store.trajectories.messages_to(call.prompt_node)
        prompt = RecordedPrompt(messages, recorded.tools, sampling_of(call), recorded.trajectory.family)
        sides: list[list[Transcript]] = []
        for policy in (candidate, live):
            sent = prompt.messages_for(policy, self.store)
            replies = replica.chat(policy.served_name, sent, prompt.tools, prompt.sampling, self.samples)
            name = f"evaluation:{recorded.trajectory.id}:{policy.version}"
            sides.append(
                [
                    _make_transcript(recorded, call, f"{name}:{number}", policy, (*messages, reply), tokens)
                    for number, (reply, tokens) in enumerate(replies)
                ]
            )
        return sides[0], sides[1]


def _make_transcript(
    recorded: Transcript,
    call: Call,
    name: str,
    policy: Policy,
    messages: tuple[Mapping[str, Any], ...],
    tokens: int,
) -> Transcript:
    """Return the transcript that the proxy would have recorded, without token ids."""
    trajectory = msgspec.structs.replace(
        recorded.trajectory, id=f"{recorded.trajectory.id}:{name}", version=policy.version, purpose="eval"
    )
    answer = msgspec.structs.replace(
        call, trajectory_id=trajectory.id, version=policy.version, choices=(), completion_tokens=tokens
    )
    return Transcript(trajectory=trajectory, calls=(answer,), messages=messages, tools=recorded.tools, row=recorded.row)
