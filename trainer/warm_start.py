"""Warm start: supervised rounds on demonstrations and good trajectories, before or beside RL."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from statistics import fmean
from typing import Any

from pydantic import ValidationError

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.errors import RecordDamaged, RecordNotFound
from ratchet.store.operation_records import Tuning
from ratchet.store.records import OTHER, Policy, Transcript, cohort_of
from ratchet.store.states import CallState, RolloutState, TuningState
from ratchet.store.store import Store
from ratchet.trainer.collect.collector import RoleResolver
from ratchet.trainer.errors import LearningError, RowError, SettingError, TuningError
from ratchet.trainer.judges.judgement import Judge
from ratchet.trainer.judges.make_judge import make_judge
from ratchet.trainer.learner_api import LearnerProtocol, RoundReport
from ratchet.trainer.rounds.round_runner import RoundRunner
from ratchet.trainer.rows import preference_rows
from ratchet.trainer.rows.build_rows import ALL_ROLES, TrainedAnswers, build_rows
from ratchet.trainer.rows.chat_rows import ChatRenderer, ChatRowsProcess, Conversation
from ratchet.trainer.rows.token_row import Roles, TokenRow
from ratchet.trainer.settings.judge_specs import gives_only_ranks
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.trainer_settings import (
    DEMONSTRATIONS,
    POLICY,
    TrainerSettings,
    WarmStartSettings,
)
from ratchet.trainer.tasks import TaskSet, is_held_out, is_set_aside

# Warm starts that tuning runs request from the trainer.
#
# A running weight tuning requests one if its `config` holds `warm_start` and its progress has reached that stage. The
# answer is a committed round that names the tuning, or the failure of the tuning with the reason. Promises: no tuning
# gets two warm starts, whatever process dies in between.

log = logging.getLogger(__name__)

WARM_START = "warm_start"  # the key in a tuning's config, and the stage of its progress
# Errors that fail the tuning, not the trainer.
REFUSALS = (LearningError, RecordDamaged, RowError, SettingError, TuningError)

_INTERVAL_SECONDS = 5.0
_MAX_TUNINGS = 20  # newest ones


class WarmStartRequests:
    """The warm starts that the tunings of one alias request."""

    def __init__(self, store: Store, settings: TrainerSettings) -> None:
        self._store = store
        self._settings = settings
        self._checked_at = 0.0
        self._answered: set[str] = set()

    def next(self, now: float) -> Tuning | None:
        """Return the oldest tuning that waits for its warm start, if any."""
        if now - self._checked_at < _INTERVAL_SECONDS:
            return None
        self._checked_at = now
        return next((one for one in self._requesting() if not self._is_answered(one)), None)

    def gather(self, request: Tuning) -> tuple[WarmStartSettings, SFTData]:
        """Return the settings and the data of a requested warm start. Raises one of REFUSALS."""
        try:
            settings = WarmStartSettings.model_validate(request.config[WARM_START])
        except ValidationError as error:
            raise SettingError(f"tuning {request.id}: warm_start: {error.errors()[0]['msg']}") from error
        judge = make_judge(self._settings.judge, os.environ)
        try:
            with ChatRowsProcess(self._settings.base_model) as chat:
                collector = SFTDataCollector(
                    self._store,
                    self._settings.model,
                    judge,
                    chat,
                    settings,
                    tuning_id=request.id,
                    roles=Roles(self._settings.roles, self._settings.role_patterns),
                    held_out=self._settings.release.held_out_share,
                    relative=gives_only_ranks(self._settings.judge),
                )
                return settings, collector.gather(_general_data(settings))
        finally:
            judge.close()

    def refuse(self, request: Tuning, reason: str) -> None:
        log.warning("event=warm_start_refused tuning=%s reason=%r", request.id, reason)
        self._store.tunings.end(request.id, TuningState.FAILED, error=f"warm start: {reason}")

    def _requesting(self) -> list[Tuning]:
        newest = self._store.tunings.page("weights", limit=_MAX_TUNINGS, state=TuningState.RUNNING)
        running = [one for one in newest if one.alias == self._settings.model]
        requesting = [one for one in reversed(running) if WARM_START in one.config and one.id not in self._answered]
        return [one for one in requesting if (one.result or {}).get("stage") == WARM_START]

    def _is_answered(self, request: Tuning) -> bool:
        if warm_start_metrics(self._store, self._settings.model, request.id) is None:
            return False
        self._answered.add(request.id)
        return True


def _general_data(settings: WarmStartSettings) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if settings.general is not None:
        for task in TaskSet.open(settings.general).rows(settings.general_split):
            yield task.id, task.row


# General chat data: preserves the policy's other abilities during a warm start. Pure.
#
# A fixed part is held out and only measured: the mean loss of its answers before and after the warm start measures
# general ability. Only the content decides which conversations are held out, so that warm starts are comparable.


def general_rows(
    conversations: Iterable[tuple[str, Mapping[str, Any]]], chat: ChatRenderer, settings: WarmStartSettings
) -> tuple[list[TokenRow], list[TokenRow], Counter[str]]:
    """Return rows to train on, rows that are only measured, and the counts of skipped conversations by reason.

    Conversations are given as (id, task row with `messages`). Raises LearningError if none is left.
    """
    skipped: Counter[str] = Counter()
    rendered: dict[str, list[TokenRow]] = {}
    for name, row in conversations:
        try:
            rendered[name] = chat.rows(_conversation(name, row))
        except RowError as refused:
            skipped[str(refused)] += 1
    order = sorted(rendered, key=lambda name: blake2b(name.encode(), digest_size=8).digest())
    measured = min(settings.general_held_out, len(order) // 2)
    if not measured:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in skipped.most_common(3)) or "it is empty"
        raise LearningError(f"general data {settings.general}: no conversations to mix in and measure ({reasons})")
    trained, held_out = (
        [row for name in part for row in rendered[name]] for part in (order[measured:], order[:measured])
    )
    return trained, held_out, skipped


def mix_rows(examples: Sequence[TokenRow], general: Sequence[TokenRow], ratio: float, seed: int) -> list[TokenRow]:
    """Return the examples and a random sample of general rows, so that these are `ratio` of all, or as many as
    exist.
    """
    wanted = min(len(general), round(len(examples) * ratio / (1 - ratio)))
    return [*examples, *random.Random(seed).sample(list(general), wanted)]


def mean_loss(learner: LearnerProtocol, rows: Sequence[TokenRow]) -> float:
    """Return the mean of -log p over the answers' tokens, in nats."""
    scored = learner.score(rows)
    return fmean(
        -logprob
        for row, logprobs in zip(rows, scored, strict=True)
        for logprob, carries in zip(logprobs, row.mask, strict=True)
        if carries
    )


def _conversation(name: str, row: Mapping[str, Any]) -> Conversation:
    messages, tools = (_parsed(row.get(column)) for column in ("messages", "tools"))
    if messages is None:
        raise RowError("a row without `messages`")
    return Conversation.of_messages(name, messages, tools)


def _parsed(value: Any) -> Any:
    """Return a column, parsed if it is a JSON string."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise RowError("a column that is neither a list nor JSON") from error


# The examples of a warm start: recorded trajectories that are good enough, as rows.
#
#     source          trajectories                                  rows
#     --------------  --------------------------------------------  ----------------------------------------------------
#     policy          the policy's live trajectories with a high    the ids that the engine sampled
#                     enough score, and what the tuning collected
#     demonstrations  the newest demonstration for each answer      rendered with the policy's chat template
#     a model's name  trajectories of that model, judged now        rendered with the policy's chat template
#
# Promises: evaluation and held-out tasks are never trained, whichever model answered; skipped trajectories are counted
# by reason; at most `max_per_task` examples of a task are used, the best first. Changes nothing in the store.

COLLECTED = "collected"  # the candidate's name of rollouts on training tasks that only serve as SFT examples

_PAGE = 500
_HELD_OUT = "of a held-out task"


@dataclass(slots=True)
class SFTData:
    """What a warm start trains on and is measured with.

    rows           the examples, in no order with general data once `gather` has mixed them
    scores         by trajectory; None for demonstrations
    skipped        trajectories that are not used, by reason
    general_rows   number of general rows among `rows`
    held_out       general rows that are only measured
    """

    rows: list[TokenRow] = field(default_factory=list)
    scores: dict[str, float | None] = field(default_factory=dict)
    by_source: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    general_rows: int = 0
    held_out: list[TokenRow] = field(default_factory=list)
    general_skipped: Counter[str] = field(default_factory=Counter)


Example = tuple[str, float | None, Callable[[], Sequence[TokenRow]]]  # trajectory, its score, what makes its rows


@dataclass
class SFTDataCollector:
    """Collects the data of a warm start of one alias.

    `held_out`: share of the tasks that are held out. `relative`: the judge only ranks, so that `min_score` is
    meaningless and the best of each group are used.
    """

    store: Store
    alias: str
    judge: Judge
    chat: ChatRenderer
    settings: WarmStartSettings
    tuning_id: str = ""
    roles: Roles = ALL_ROLES
    held_out: float = 0.0
    relative: bool = False

    def __post_init__(self) -> None:
        self._role_resolver = RoleResolver(self.store, self.alias, self.roles)

    def gather(self, general: Iterable[tuple[str, Mapping[str, Any]]] = ()) -> SFTData:
        """Return the examples and general data. Raises LearningError, with the counts of what was skipped, if
        they are too few.
        """
        found, settings = self.collect(), self.settings
        if len(found.scores) < settings.min_trajectories:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in found.skipped.most_common())
            raise LearningError(
                f"{len(found.scores)} trajectories to train on from {', '.join(settings.sources)}, "
                f"{settings.min_trajectories} are needed ({reasons or 'none were found'}): lower min_score or `least`, "
                "or let the agent work first"
            )
        if settings.general is not None:
            trained, found.held_out, found.general_skipped = general_rows(general, self.chat, settings)
            examples = len(found.rows)
            found.rows = mix_rows(found.rows, trained, settings.general_ratio, settings.seed)
            found.general_rows = len(found.rows) - examples
        return found

    def collect(self) -> SFTData:
        """Return the examples of all sources in the settings. Raises SettingError for an ambiguous source name."""
        found, own = SFTData(), {POLICY: self._of_policy, DEMONSTRATIONS: self._demonstrations}
        for source in self.settings.sources:
            if (
                source in own
                and source != self.alias
                and self.store.trajectories.page(1, chosen=TrajectoryFilter(alias=source))
            ):
                raise SettingError(
                    f"warm_start.sources: {source!r} is a reserved source name, and the store has trajectories of a "
                    "model with that name: serve the model under another name, or remove the source"
                )
            for name, score, make_rows in own.get(source, partial(self._of_teacher, source))(found.skipped):
                try:
                    rows = make_rows()
                except RowError as refused:
                    found.skipped[str(refused)] += 1
                    continue
                if not rows:
                    found.skipped["no trainable answer"] += 1
                    continue
                found.rows.extend(rows)
                found.scores[name] = score
                found.by_source[source] += 1
        return found

    def _of_policy(self, skipped: Counter[str]) -> Iterator[Example]:
        live = self.store.groups.past_scores(self.alias, self.judge.version, limit=self.settings.max_per_source)
        judged_at = {one.trajectory_id: one.judged_at for one in live}
        collected = [one for one in self.store.rollouts.of_tuning(self.tuning_id, COLLECTED) if one.score is not None]
        judged_at |= {one.id: math.inf for one in collected}
        scored = [(cohort_of(one.task_id, "", ""), one.id, one.score or 0.0) for one in collected]
        scored += [(one.cohort, one.trajectory_id, one.score) for one in live]
        for name, score in self._select(skipped, reversed(scored)):
            transcript = self.store.trajectories.read(name)
            if transcript.trajectory.purpose != "live" and judged_at[name] != math.inf:
                skipped["evaluated"] += 1
            else:
                yield name, score, partial(self._sampled_rows, transcript, judged_at[name])

    def _sampled_rows(self, transcript: Transcript, until: float) -> list[TokenRow]:
        """Return the rows of the answers that the judge saw. Raises RowError."""
        calls = self._role_resolver.with_roles(self.store.trajectories.context_calls(transcript))
        seen = [call for call in calls if call.ended_at is not None and call.ended_at <= until]
        try:
            rows = build_rows(transcript.trajectory.id, seen, 1.0, self._role_resolver.roles, imitated=True).rows
        except RowError as error:
            raise RowError("invalid_row") from error
        # Trained at temperature 1 whatever they were sampled at; SFT has no ratio, so their logprobs are unused.
        return [dataclasses.replace(row, temperature=1.0, importance=False, truncation=None) for row in rows]

    def _demonstrations(self, skipped: Counter[str]) -> Iterator[Example]:
        for name in self._demonstration_ids():
            transcript = self.store.trajectories.read(name)
            if transcript.trajectory.alias != self.alias or transcript.trajectory.purpose != "live":
                skipped["demonstration elsewhere"] += 1
                continue
            if is_set_aside(transcript.trajectory, self.held_out):
                skipped[_HELD_OUT] += 1
                continue
            demonstrations = preference_rows.demonstrations([transcript], self.store.trajectories.messages_to)
            skipped.update(demonstrations.skipped)
            for row in demonstrations.rows:
                prompt, answer = row["prompt"], row["completion"]
                tools = tuple(json.loads(row["tools"])) if "tools" in row else ()
                one = Conversation(name, (*prompt, *answer), frozenset({len(prompt)}), tools)
                yield name, None, partial(self.chat.rows, one)

    def _of_teacher(self, teacher: str, skipped: Counter[str]) -> Iterator[Example]:
        cohorts: dict[str, list[Transcript]] = defaultdict(list)
        for transcript in self._teacher_transcripts(teacher, skipped):
            cohorts[transcript.trajectory.group_key].append(transcript)
        judged: list[tuple[str, str, float]] = []
        read: dict[str, Transcript] = {}
        for cohort, members in cohorts.items():
            for member, verdict in zip(members, self.judge.judge(None, members).verdicts, strict=True):
                if verdict.score is None:
                    skipped["judge failed"] += 1
                else:
                    judged.append((cohort, member.trajectory.id, verdict.score))
                    read[member.trajectory.id] = member
        for name, score in self._select(skipped, judged):
            yield name, score, partial(self._rendered_rows, read[name])

    def _rendered_rows(self, transcript: Transcript) -> list[TokenRow]:
        """Return the rows of another model's conversations. Raises RowError."""
        conversations = find_conversations(transcript, self.store, self._role_resolver)
        return [row for one in conversations for row in self.chat.rows(one)]

    def _teacher_transcripts(self, teacher: str, skipped: Counter[str]) -> Iterator[Transcript]:
        before = None
        left = self.settings.max_per_source
        while left > 0:
            page = self.store.trajectories.page(min(_PAGE, left), before, chosen=TrajectoryFilter(alias=teacher))
            if not page:
                return
            for run in page:
                if is_set_aside(run, self.held_out):
                    skipped[_HELD_OUT] += 1
                elif run.purpose == OTHER and not self._is_measured(run.id):
                    yield self.store.trajectories.read(run.id)
                else:
                    skipped["evaluated"] += 1
            left -= len(page)
            before = page[-1].id

    def _is_measured(self, trajectory_id: str) -> bool:
        """Return whether a tuner measured with it, or abandoned it: held-out tasks must not be trained."""
        try:
            rollout = self.store.rollouts.get(trajectory_id)
        except RecordNotFound:
            return False
        abandoned = rollout.state is RolloutState.ABANDONED
        return rollout.purpose != "live" or rollout.split != "train" or abandoned

    def _demonstration_ids(self) -> list[str]:
        """Return the ids of trajectories with a demonstration in their feedback, newest first."""
        names: dict[str, None] = {}
        before = None
        while len(names) < self.settings.max_per_source and (page := self.store.feedback.page(_PAGE, before)):
            names |= {one.trajectory_id: None for one in page if one.demonstration and one.trajectory_id}
            before = page[-1].id
        return list(names)

    def _select(self, skipped: Counter[str], scored: Iterable[tuple[str, str, float]]) -> list[tuple[str, float]]:
        """Return (trajectory, score) of the best ones of each task that reach min_score; newest tasks first."""
        min_score, max_per_task = -math.inf if self.relative else self.settings.min_score, self.settings.max_per_task
        by_task: dict[str, list[tuple[str, float]]] = defaultdict(list)
        for cohort, name, score in scored:
            if is_held_out(cohort, self.held_out):
                skipped[_HELD_OUT] += 1
            elif score >= min_score:
                by_task[cohort].append((name, score))
            else:
                skipped[f"score below {min_score:g}"] += 1
        for members in by_task.values():
            if self.relative:
                mean = sum(score for _, score in members) / len(members)
                above = [member for member in members if member[1] > mean]
                if len(above) < len(members):
                    skipped["not above its group (the judge only ranks)"] += len(members) - len(above)
                members[:] = above
            members.sort(key=lambda member: -member[1])
            if len(members) > max_per_task:
                skipped["more of the same task"] += len(members) - max_per_task
        return [member for members in by_task.values() for member in members[:max_per_task]]


def find_conversations(transcript: Transcript, store: Store, role_resolver: RoleResolver) -> list[Conversation]:
    """Return the conversations of a trajectory, one for each branch. Each answer is trained in exactly one of them.

    Answers of roles that do not train are trained in none.
    """
    trained = {call.id for call in role_resolver.with_roles(transcript.calls) if role_resolver.roles.trains(call.role)}
    taken = TrainedAnswers(transcript.calls)
    parents: dict[tuple[str, int], tuple[str | None, int]] = {}
    nodes: dict[tuple[str, int], str] = {}
    for call in transcript.calls:
        for choice in call.choices if call.state is CallState.ANSWERED and call.dialect != "completions" else ():
            if choice.reply_node and taken.why_not(call, choice) is None:
                nodes[call.id, choice.index] = choice.reply_node
                parents[call.id, choice.index] = (call.parent_call, call.parent_choice)
    found: list[Conversation] = []
    covered: set[tuple[str, int]] = set()
    for key in reversed(list(nodes)):  # the last ones first, so that a chain of calls is one conversation
        if key in covered:
            continue
        messages = store.trajectories.messages_to(nodes[key])
        places = dict(_places(key, messages, nodes, parents, store))
        trained_places = {place for place, answer in places.items() if answer not in covered and answer[0] in trained}
        covered |= set(places.values())
        if trained_places:
            found.append(Conversation(transcript.trajectory.id, messages, frozenset(trained_places), transcript.tools))
    return found[::-1]


def _places(
    key: tuple[str, int],
    messages: Sequence[Mapping[str, object]],
    nodes: Mapping[tuple[str, int], str],
    parents: Mapping[tuple[str, int], tuple[str | None, int]],
    store: Store,
) -> Iterator[tuple[int, tuple[str, int]]]:
    """Yield the positions among the messages of an answer and of the earlier answers that they contain."""
    yield len(messages) - 1, key
    call_id, choice = parents[key]
    while call_id is not None and (call_id, choice) in nodes:
        earlier = store.trajectories.messages_to(nodes[call_id, choice])
        if tuple(messages[: len(earlier)]) == tuple(earlier):
            yield len(earlier) - 1, (call_id, choice)
        call_id, choice = parents[call_id, choice]


# The warm start of one alias: a round of supervised fine-tuning (SFT), and the candidate version that results.
#
# It works like any round: the same learner with the loss `sft`, one transaction that commits the checkpoint and
# registers the candidate, which is then proven, evaluated and released. It consumes no trajectory: its examples may
# have been trained before, or be trained later; the round records their ids, so that deletion finds them. Promises: a
# warm start with too few examples is refused with the reason, before any weight changes.


def learner_settings(settings: WarmStartSettings, learner: LearnerSettings, rows: int) -> LearnerSettings:
    return dataclasses.replace(
        learner,
        loss_type="sft",
        epsilon=None,
        epsilon_high=None,
        beta=0.0,
        entropy_coef=0.0,
        top_entropy_quantile=1.0,
        learning_rate=settings.learning_rate or learner.learning_rate,
        steps_per_round=-(-rows // settings.batch_size),
    )


class SFTRound:
    """Runs the warm starts of one alias."""

    def __init__(self, store: Store, round_runner: RoundRunner, alias: str) -> None:
        self._store = store
        self._round_runner = round_runner
        self._alias = alias

    def run(
        self,
        learner: LearnerProtocol,
        data: SFTData,
        settings: WarmStartSettings,
        from_version: int,
        tuning_id: str,
        on_epoch: Callable[[int, RoundReport], None] = lambda epoch, report: None,
    ) -> Policy:
        """Train and commit. The learner must have the settings of `learner_settings`.

        Raises LearningError if the general loss rose too much, TrainingDiverged, NoLearningSignal; the learner needs
        a reload then.
        """
        reference = self._round_runner.next_reference()  # a store that is away costs no step
        started = self._store.rounds.start(self._alias, from_version)
        rows = [row for row in data.rows if learner.unfit(row) is None]
        measured = [row for row in data.held_out if learner.unfit(row) is None]
        try:
            before = mean_loss(learner, measured) if measured else None
            reports = []
            for epoch in range(settings.num_train_epochs):
                reports.append(learner.train_round(rows))
                on_epoch(epoch + 1, reports[-1])
            after = mean_loss(learner, measured) if measured else None
            _check_loss_increase(before, after, settings)
        except LearningError as error:
            self._store.rounds.abandon(started.id, str(error))
            raise
        story = _report(data, settings, reports, before, after, len(rows)) | {"tuning": tuning_id}
        candidate = self._round_runner.commit(
            learner,
            started,
            reference,
            groups=[],
            metrics=_metrics(data, reports, story),
            demonstrations=sorted(data.scores),
        )
        log.info(
            "event=warm_start_committed policy=%s@%d trajectories=%d rows=%d loss=%.4f general_before=%s "
            "general_after=%s",
            self._alias, candidate.version, len(data.scores), len(rows), reports[-1].loss, before, after,
        )  # fmt: skip
        return candidate


def warm_start_metrics(store: Store, alias: str, tuning_id: str) -> tuple[int, Mapping[str, Any]] | None:
    """Return the version and the report of a tuning's warm start; None before its commit."""
    before = None
    while page := store.rounds.page(alias, limit=200, before=before):
        for one in page:
            story = one.metrics.get(WARM_START)
            if one.to_version is not None and story is not None and story.get("tuning") == tuning_id:
                return one.to_version, story
        before = page[-1].id
    return None


def _check_loss_increase(before: float | None, after: float | None, settings: WarmStartSettings) -> None:
    limit = settings.max_loss_increase
    if limit is not None and before is not None and after is not None and after - before > limit:
        raise LearningError(
            f"the held-out general loss rose from {before:.4f} to {after:.4f} nats, more than max_loss_increase "
            f"{limit:g}: raise general_ratio, or lower epochs or learning_rate"
        )


def _report(
    data: SFTData,
    settings: WarmStartSettings,
    reports: Sequence[RoundReport],
    before: float | None,
    after: float | None,
    rows: int,
) -> dict[str, Any]:
    return {
        "trajectories": len(data.scores),
        "by_source": dict(data.by_source),
        "skipped": dict(data.skipped),
        "rows": rows,
        "general_rows": data.general_rows,
        "general_skipped": dict(data.general_skipped),
        "general_held_out": len(data.held_out),
        "general_loss_before": before,
        "general_loss_after": after,
        "loss_by_epoch": [report.loss for report in reports],
        "settings": settings.model_dump(mode="json"),
    }


def _metrics(data: SFTData, reports: Sequence[RoundReport], story: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of the round: those of its last epoch, with the sums over all epochs."""
    scores = [score for score in data.scores.values() if score is not None]
    return reports[-1].figures() | {
        "optimizer_steps": sum(report.optimizer_steps for report in reports),
        "tokens_trained": sum(report.tokens_trained for report in reports),
        "seconds": sum(report.seconds for report in reports),
        "groups": 0,
        "trajectories": len(data.scores),
        "reward": fmean(scores) if scores else 0.0,
        "untrained_tokens": {},
        WARM_START: dict(story),
    }
