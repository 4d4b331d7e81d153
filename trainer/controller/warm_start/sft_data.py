"""The examples of a warm start: recorded trajectories that are good enough, as rows.

    source          trajectories                                  rows
    --------------  --------------------------------------------  ----------------------------------------------------
    policy          the policy's live trajectories with a high    the ids that the engine sampled
                    enough score, and what the tuning collected
    demonstrations  the newest demonstration for each answer      rendered with the policy's chat template
    a model's name  trajectories of that model, judged now        rendered with the policy's chat template

Promises: evaluation and held-out tasks are never trained, whichever model answered; skipped trajectories are counted by
reason; at most `max_per_task` examples of a task are used, the best first. Changes nothing in the store.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.errors import RecordNotFound
from ratchet.store.records import OTHER, Transcript, cohort_of
from ratchet.store.states import CallState, RolloutState
from ratchet.store.store import Store
from ratchet.trainer.controller.collect.role_resolution import RoleResolver
from ratchet.trainer.controller.judges import Judge
from ratchet.trainer.errors import RowError, SettingError
from ratchet.trainer.rows import preference_rows
from ratchet.trainer.rows.build_rows import ALL_ROLES, TrainedAnswers, build_rows
from ratchet.trainer.rows.chat_rows import ChatRenderer, Conversation
from ratchet.trainer.rows.roles import Roles
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.warm_start_settings import (
    DEMONSTRATIONS,
    POLICY,
    RESERVED_SOURCES,
    WarmStartSettings,
)
from ratchet.trainer.tasks.held_out import is_held_out, is_set_aside

COLLECTED = "collected"  # the candidate's name of rollouts on training tasks that only serve as SFT examples

_PAGE = 500
_HELD_OUT = "of a held-out task"


@dataclass(frozen=True, slots=True)
class SFTRows:
    """Rows, the scores of their trajectories, and the counts of skipped trajectories by reason."""

    rows: list[TokenRow] = field(default_factory=list)
    scores: dict[str, float | None] = field(default_factory=dict)  # by trajectory; None for demonstrations
    by_source: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, source: str, trajectory_id: str, score: float | None, rows: Sequence[TokenRow]) -> None:
        """Add the rows of a trajectory."""
        if rows:
            self.rows.extend(rows)
            self.scores[trajectory_id] = score
            self.by_source[source] += 1
        else:
            self.skipped["no trainable answer"] += 1


class SFTDataCollector:
    """Collects the SFT examples of one alias from the store."""

    def __init__(
        self,
        store: Store,
        alias: str,
        judge: Judge,
        chat: ChatRenderer,
        settings: WarmStartSettings,
        tuning_id: str = "",
        roles: Roles = ALL_ROLES,
        held_out: float = 0.0,
        relative: bool = False,
    ) -> None:
        self._store = store
        self._relative = relative  # the judge only ranks: `min_score` is meaningless, the best of each group are used
        self._held_out = held_out
        self._alias = alias
        self._role_resolver = RoleResolver(store, alias, roles)
        self._tuning_id = tuning_id
        self._judge = judge
        self._chat = chat
        self._settings = settings

    def collect(self) -> SFTRows:
        """Return the examples of all sources in the settings. Raises SettingError for an ambiguous source name."""
        for name in RESERVED_SOURCES:
            if name in self._settings.sources and name != self._alias and self._has_model(name):
                raise SettingError(
                    f"warm_start.sources: {name!r} is a reserved source name, and the store has trajectories of a "
                    "model with that name: serve the model under another name, or remove the source"
                )
        found = SFTRows()
        if POLICY in self._settings.sources:
            self._add_policy(found)
        if DEMONSTRATIONS in self._settings.sources:
            self._add_demonstrations(found)
        for teacher in self._settings.teachers:
            self._add_teacher(found, teacher)
        return found

    def _has_model(self, name: str) -> bool:
        return bool(self._store.trajectories.page(1, chosen=TrajectoryFilter(alias=name)))

    def _add_policy(self, found: SFTRows) -> None:
        live = self._store.groups.past_scores(self._alias, self._judge.version, limit=self._settings.max_per_source)
        judged_at = {one.trajectory_id: one.judged_at for one in live}
        collected = [one for one in self._store.rollouts.of_tuning(self._tuning_id, COLLECTED) if one.score is not None]
        judged_at |= {one.id: math.inf for one in collected}
        scored = [(cohort_of(one.task_id, "", ""), one.id, one.score or 0.0) for one in collected]
        scored += [(one.cohort, one.trajectory_id, one.score) for one in live]
        for name, score in self._select(found, reversed(scored)):
            transcript = self._store.trajectories.read(name)
            if transcript.trajectory.purpose != "live" and judged_at[name] != math.inf:
                found.skipped["evaluated"] += 1
                continue
            calls = self._role_resolver.with_roles(self._store.trajectories.context_calls(transcript))
            seen = [call for call in calls if call.ended_at is not None and call.ended_at <= judged_at[name]]
            try:
                rows = build_rows(name, seen, 1.0, self._role_resolver.roles, imitated=True).rows
            except RowError:
                found.skipped["invalid_row"] += 1
                continue
            # Trained at temperature 1 whatever they were sampled at; SFT has no ratio, so their logprobs are unused.
            plain = [dataclasses.replace(row, temperature=1.0, importance=False, truncation=None) for row in rows]
            found.add(POLICY, name, score, plain)

    def _add_demonstrations(self, found: SFTRows) -> None:
        for name in self._demonstration_ids():
            transcript = self._store.trajectories.read(name)
            if transcript.trajectory.alias != self._alias or transcript.trajectory.purpose != "live":
                found.skipped["demonstration elsewhere"] += 1
                continue
            if is_set_aside(transcript.trajectory, self._held_out):
                found.skipped[_HELD_OUT] += 1
                continue
            demonstrations = preference_rows.demonstrations([transcript], self._store.trajectories.messages_to)
            found.skipped.update(demonstrations.skipped)
            for row in demonstrations.rows:
                prompt, answer = row["prompt"], row["completion"]
                tools = tuple(json.loads(row["tools"])) if "tools" in row else ()
                one = Conversation(name, (*prompt, *answer), frozenset({len(prompt)}), tools)
                self._render(found, DEMONSTRATIONS, name, None, [one])

    def _add_teacher(self, found: SFTRows, teacher: str) -> None:
        cohorts: dict[str, list[Transcript]] = defaultdict(list)
        for transcript in self._teacher_transcripts(teacher, found):
            cohorts[transcript.trajectory.group_key].append(transcript)
        judged: list[tuple[str, str, float]] = []
        read: dict[str, Transcript] = {}
        for cohort, members in cohorts.items():
            for member, verdict in zip(members, self._judge.judge(None, members).verdicts, strict=True):
                if verdict.score is None:
                    found.skipped["judge failed"] += 1
                else:
                    judged.append((cohort, member.trajectory.id, verdict.score))
                    read[member.trajectory.id] = member
        for name, score in self._select(found, judged):
            self._render(found, teacher, name, score, find_conversations(read[name], self._store, self._role_resolver))

    def _teacher_transcripts(self, teacher: str, found: SFTRows) -> Iterator[Transcript]:
        before = None
        left = self._settings.max_per_source
        while left > 0:
            page = self._store.trajectories.page(min(_PAGE, left), before, chosen=TrajectoryFilter(alias=teacher))
            if not page:
                return
            for run in page:
                if is_set_aside(run, self._held_out):
                    found.skipped[_HELD_OUT] += 1
                elif run.purpose == OTHER and not self._is_measured(run.id):
                    yield self._store.trajectories.read(run.id)
                else:
                    found.skipped["evaluated"] += 1
            left -= len(page)
            before = page[-1].id

    def _is_measured(self, trajectory_id: str) -> bool:
        """Return whether a tuner measured with it, or abandoned it: held-out tasks must not be trained."""
        try:
            rollout = self._store.rollouts.get(trajectory_id)
        except RecordNotFound:
            return False
        abandoned = rollout.state is RolloutState.ABANDONED
        return rollout.purpose != "live" or rollout.split != "train" or abandoned

    def _demonstration_ids(self) -> list[str]:
        """Return the ids of trajectories with a demonstration in their feedback, newest first."""
        names: dict[str, None] = {}
        before = None
        while len(names) < self._settings.max_per_source and (page := self._store.feedback.page(_PAGE, before)):
            names |= {one.trajectory_id: None for one in page if one.demonstration and one.trajectory_id}
            before = page[-1].id
        return list(names)

    def _select(self, found: SFTRows, scored: Iterable[tuple[str, str, float]]) -> list[tuple[str, float]]:
        """Return (trajectory, score) of the best ones of each task that reach min_score; newest tasks first."""
        min_score, max_per_task = -math.inf if self._relative else self._settings.min_score, self._settings.max_per_task
        by_task: dict[str, list[tuple[str, float]]] = defaultdict(list)
        for cohort, name, score in scored:
            if is_held_out(cohort, self._held_out):
                found.skipped[_HELD_OUT] += 1
            elif score >= min_score:
                by_task[cohort].append((name, score))
            else:
                found.skipped[f"score below {min_score:g}"] += 1
        for members in by_task.values():
            if self._relative:
                mean = sum(score for _, score in members) / len(members)
                above = [member for member in members if member[1] > mean]
                if len(above) < len(members):
                    found.skipped["not above its group (the judge only ranks)"] += len(members) - len(above)
                members[:] = above
            members.sort(key=lambda member: -member[1])
            if len(members) > max_per_task:
                found.skipped["more of the same task"] += len(members) - max_per_task
        return [member for members in by_task.values() for member in members[:max_per_task]]

    def _render(
        self, found: SFTRows, source: str, name: str, score: float | None, conversations: Sequence[Conversation]
    ) -> None:
        rows: list[TokenRow] = []
        for one in conversations:
            try:
                rows += self._chat.rows(one)
            except RowError as refused:
                found.skipped[str(refused)] += 1
                return
        found.add(source, name, score, rows)


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
