"""What is there to imitate: recorded trajectories that are good enough, as rows, and why others are not.

    source   what                                              how it becomes rows
    ------   ------------------------------------------------  -----------------------------------------------------
    own      the policy's live trajectories whose newest score the ids that the engine sampled
             is high enough, and what the tuning collected
    shown    the newest demonstration of each answer           rendered with the policy's chat template
    a model  another model's trajectories, judged now          rendered with the policy's chat template

Promises: what was evaluated or is held out is never imitated, be it a version's or another model's; every trajectory
that is left out is counted with its reason; of a task at most `max_per_task` are taken, the best first. Changes
nothing in the store.
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
from ratchet.trainer.errors import RowError
from ratchet.trainer.rows import preference_rows
from ratchet.trainer.rows.build_rows import ALL_ROLES, TrainedAnswers, build_rows
from ratchet.trainer.rows.chat_rows import ChatRows, Conversation
from ratchet.trainer.rows.roles import Roles
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.warm_start_settings import DEMONSTRATIONS, POLICY, WarmStartSettings
from ratchet.trainer.tasks.held_out import is_held_out, is_set_aside

COLLECTED = "collected"  # the candidate's name of rollouts at training tasks that are only there to be imitated

_PAGE = 500
_SET_ASIDE = "of a held-out task"


@dataclass(frozen=True, slots=True)
class SFTRows:
    """The rows, the trajectories that they are of with their scores, and what was left out, by reason."""

    rows: list[TokenRow] = field(default_factory=list)
    scores: dict[str, float | None] = field(default_factory=dict)  # by trajectory; None of what was shown
    by_source: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)

    def add(self, source: str, trajectory_id: str, score: float | None, rows: Sequence[TokenRow]) -> None:
        """Take the rows of a trajectory."""
        if rows:
            self.rows.extend(rows)
            self.scores[trajectory_id] = score
            self.by_source[source] += 1
        else:
            self.left_out["no trainable answer"] += 1


class Search:
    """Looks through the store for what one alias can imitate."""

    def __init__(
        self,
        store: Store,
        alias: str,
        judge: Judge,
        chat: ChatRows,
        settings: WarmStartSettings,
        tuning_id: str = "",
        roles: Roles = ALL_ROLES,
        held_out: float = 0.0,
        relative: bool = False,
    ) -> None:
        self._store = store
        self._relative = relative  # the judge only ranks: `min_score` means nothing, the best of each group are taken
        self._held_out = held_out
        self._alias = alias
        self._role_resolver = RoleResolver(store, alias, roles)
        self._tuning_id = tuning_id
        self._judge = judge
        self._chat = chat
        self._settings = settings

    def everything(self) -> SFTRows:
        """Return what the settings' sources hold."""
        found = SFTRows()
        if POLICY in self._settings.sources:
            self._own(found)
        if DEMONSTRATIONS in self._settings.sources:
            self._shown(found)
        for teacher in self._settings.teachers:
            self._taught(found, teacher)
        return found

    def _own(self, found: SFTRows) -> None:
        live = self._store.groups.past_scores(self._alias, self._judge.version, limit=self._settings.max_per_source)
        judged_at = {one.trajectory_id: one.judged_at for one in live}
        collected = [one for one in self._store.rollouts.of_tuning(self._tuning_id, COLLECTED) if one.score is not None]
        judged_at |= {one.id: math.inf for one in collected}
        scored = [(cohort_of(one.task_id, "", ""), one.id, one.score or 0.0) for one in collected]
        scored += [(one.cohort, one.trajectory_id, one.score) for one in live]
        for name, score in self._good(found, reversed(scored)):
            transcript = self._store.trajectories.read(name)
            if transcript.trajectory.purpose != "live" and judged_at[name] != math.inf:
                found.left_out["evaluated"] += 1
                continue
            calls = self._role_resolver.named(self._store.trajectories.context_calls(transcript))
            seen = [call for call in calls if call.ended_at is not None and call.ended_at <= judged_at[name]]
            try:
                rows = build_rows(name, seen, 1.0, self._role_resolver.roles, imitated=True).rows
            except RowError:
                found.left_out["invalid_row"] += 1
                continue
            # Imitated at temperature 1, whatever they were sampled at; without a ratio their logprobs say nothing.
            plain = [dataclasses.replace(row, temperature=1.0, importance=False) for row in rows]
            found.add(POLICY, name, score, plain)

    def _shown(self, found: SFTRows) -> None:
        for name in self._demonstrated():
            transcript = self._store.trajectories.read(name)
            if transcript.trajectory.alias != self._alias or transcript.trajectory.purpose != "live":
                found.left_out["demonstration elsewhere"] += 1
                continue
            if is_set_aside(transcript.trajectory, self._held_out):
                found.left_out[_SET_ASIDE] += 1
                continue
            shown = preference_rows.shown([transcript], self._store.trajectories.messages_to)
            found.left_out.update(shown.left_out)
            for row in shown.rows:
                prompt, answer = row["prompt"], row["completion"]
                tools = tuple(json.loads(row["tools"])) if "tools" in row else ()
                one = Conversation(name, (*prompt, *answer), frozenset({len(prompt)}), tools)
                self._render(found, DEMONSTRATIONS, name, None, [one])

    def _taught(self, found: SFTRows, teacher: str) -> None:
        cohorts: dict[str, list[Transcript]] = defaultdict(list)
        for transcript in self._answered_by(teacher, found):
            cohorts[transcript.trajectory.group_key].append(transcript)
        judged: list[tuple[str, str, float]] = []
        read: dict[str, Transcript] = {}
        for cohort, members in cohorts.items():
            for member, verdict in zip(members, self._judge.judge(None, members).verdicts, strict=True):
                if verdict.score is None:
                    found.left_out["judge failed"] += 1
                else:
                    judged.append((cohort, member.trajectory.id, verdict.score))
                    read[member.trajectory.id] = member
        for name, score in self._good(found, judged):
            self._render(found, teacher, name, score, conversations(read[name], self._store, self._role_resolver))

    def _answered_by(self, teacher: str, found: SFTRows) -> Iterator[Transcript]:
        before = None
        left = self._settings.max_per_source
        while left > 0:
            page = self._store.trajectories.page(min(_PAGE, left), before, chosen=TrajectoryFilter(alias=teacher))
            if not page:
                return
            for run in page:
                if is_set_aside(run, self._held_out):
                    found.left_out[_SET_ASIDE] += 1
                elif run.purpose == OTHER and not self._is_measured(run.id):
                    yield self._store.trajectories.read(run.id)
                else:
                    found.left_out["evaluated"] += 1
            left -= len(page)
            before = page[-1].id

    def _is_measured(self, trajectory_id: str) -> bool:
        """Return whether a tuner measured with it, or gave it up: a task that is held out must not be learnt."""
        try:
            rollout = self._store.rollouts.get(trajectory_id)
        except RecordNotFound:
            return False
        abandoned = rollout.state is RolloutState.ABANDONED
        return rollout.purpose != "live" or rollout.split != "train" or abandoned

    def _demonstrated(self) -> list[str]:
        """Return the trajectories that somebody showed an answer for, newest word first."""
        names: dict[str, None] = {}
        before = None
        while len(names) < self._settings.max_per_source and (page := self._store.feedback.page(_PAGE, before)):
            names |= {said.trajectory_id: None for said in page if said.demonstration and said.trajectory_id}
            before = page[-1].id
        return list(names)

    def _good(self, found: SFTRows, scored: Iterable[tuple[str, str, float]]) -> list[tuple[str, float]]:
        """Return (trajectory, score) of those that are good enough, the best of each task; the newest come first."""
        least, most = -math.inf if self._relative else self._settings.min_score, self._settings.max_per_task
        by_task: dict[str, list[tuple[str, float]]] = defaultdict(list)
        for cohort, name, score in scored:
            if is_held_out(cohort, self._held_out):
                found.left_out[_SET_ASIDE] += 1
            elif score >= least:
                by_task[cohort].append((name, score))
            else:
                found.left_out[f"score below {least:g}"] += 1
        for members in by_task.values():
            if self._relative:
                middle = sum(score for _, score in members) / len(members)
                above = [member for member in members if member[1] > middle]
                if len(above) < len(members):
                    found.left_out["not above its group (the judge only ranks)"] += len(members) - len(above)
                members[:] = above
            members.sort(key=lambda member: -member[1])
            if len(members) > most:
                found.left_out["more of the same task"] += len(members) - most
        return [member for members in by_task.values() for member in members[:most]]

    def _render(
        self, found: SFTRows, source: str, name: str, score: float | None, told: Sequence[Conversation]
    ) -> None:
        rows: list[TokenRow] = []
        for one in told:
            try:
                rows += self._chat.rows(one)
            except RowError as refused:
                found.left_out[str(refused)] += 1
                return
        found.add(source, name, score, rows)


def conversations(transcript: Transcript, store: Store, casting: RoleResolver) -> list[Conversation]:
    """Return the histories of a trajectory, each answer learnt in one of them: one more for each fork.

    Answers of roles that do not train are learnt in none.
    """
    trained = {call.id for call in casting.named(transcript.calls) if casting.roles.trains(call.role)}
    taken = TrainedAnswers(transcript.calls)
    parents: dict[tuple[str, int], tuple[str | None, int]] = {}
    nodes: dict[tuple[str, int], str] = {}
    for call in transcript.calls:
        for choice in call.choices if call.state is CallState.ANSWERED and call.dialect != "completions" else ():
            if choice.reply_node and taken.why_not(call, choice) is None:
                nodes[call.id, choice.index] = choice.reply_node
                parents[call.id, choice.index] = (call.parent_call, call.parent_choice)
    told: list[Conversation] = []
    covered: set[tuple[str, int]] = set()
    for key in reversed(list(nodes)):  # the last ones first, so that long chains are one history
        if key in covered:
            continue
        messages = store.trajectories.messages_to(nodes[key])
        places = dict(_places(key, messages, nodes, parents, store))
        learnt = {place for place, answer in places.items() if answer not in covered and answer[0] in trained}
        covered |= set(places.values())
        if learnt:
            told.append(Conversation(transcript.trajectory.id, messages, frozenset(learnt), transcript.tools))
    return told[::-1]


def _places(
    key: tuple[str, int],
    messages: Sequence[Mapping[str, object]],
    nodes: Mapping[tuple[str, int], str],
    parents: Mapping[tuple[str, int], tuple[str | None, int]],
    store: Store,
) -> Iterator[tuple[int, tuple[str, int]]]:
    """Yield the place among the messages of an answer and of those before it that the history still holds."""
    yield len(messages) - 1, key
    call_id, choice = parents[key]
    while call_id is not None and (call_id, choice) in nodes:
        earlier = store.trajectories.messages_to(nodes[call_id, choice])
        if tuple(messages[: len(earlier)]) == tuple(earlier):
            yield len(earlier) - 1, (call_id, choice)
        call_id, choice = parents[call_id, choice]
