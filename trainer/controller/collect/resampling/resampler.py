"""Resamples of one alias: which singles get further answers, when they are asked for, and the groups that come of them.

Consumes single-call trajectories that found no company, and sealed resamples; produces groups of an original with its
resamples, as any group. Promises: an original waits at most twice `max_wait_seconds` for an idle vLLM and then
goes the way of every single; rates are counted in the store, so that a restart does not double them; a shadow that cannot
be compared is dropped with its reason; one whose original was deleted is deleted. If resampling is off, planned
resamples are dropped.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby

from ratchet.store.calls.resamples import Resample
from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.errors import InvalidTransition, StoreError
from ratchet.store.reasons import DropReason
from ratchet.store.records import RESAMPLE, Trajectory
from ratchet.store.states import ResampleState
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_load import BusyPeriod, Load
from ratchet.trainer.controller.collect.grouping import PlannedGroup
from ratchet.trainer.controller.collect.resampling import resample_request
from ratchet.trainer.controller.collect.resampling.resample_call import Outcome, ResamplingClient
from ratchet.trainer.settings.resampling_settings import ResamplingSettings

log = logging.getLogger(__name__)

_MINUTE = 60.0
_BUSY_PAUSE_SECONDS = 0.5  # seconds until a busy vLLM is looked at again
_FAILURES = 3  # in a row that are an alarm
_MAX_UNFIT = 10_000  # trajectories


@dataclass(slots=True)
class ResamplingResult:
    """What became of resamples: groups and drops; `held` wait or were grouped here, `lonely` got nobody."""

    groups: list[PlannedGroup] = field(default_factory=list)
    drops: list[tuple[str, str]] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    lonely: set[str] = field(default_factory=set)


class Resampler:
    """The shadow re-sampling of one alias. Every verb but the calls themselves returns at once."""

    def __init__(
        self,
        store: Store,
        alias: str,
        settings: ResamplingSettings,
        *,
        least: int,
        key: str | None,
        load: Callable[[], Load],
    ) -> None:
        self._store = store
        self._alias = alias
        self._settings = settings
        self._least = least
        self._caller = ResamplingClient(store, settings, key, load)
        self._threads = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="shadow")
        self._asked: dict[str, tuple[Resample, Future[Outcome]]] = {}
        self._unasked = 0  # that are planned
        self._originals: set[str] | None = None  # that wait for resamples; None: not read from the store yet
        self._unfit: dict[str, None] = {}  # trajectories that cannot be asked again
        self._not_before = 0.0
        self._failures = 0  # in a row
        self._busy_period = BusyPeriod()

    def close(self) -> None:
        """Ask no more; what is under way is given up at the next start."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._caller.close()

    def seal(self, shipped_until: float) -> None:
        """Seal the trajectories of resamples that are over, while any are waited for."""
        if self._originals is None or self._originals:
            self._store.resamples.seal_trajectories(self._alias, shipped_until)

    def look(self, waiting: Sequence[Trajectory], shipped_until: float, now: float) -> ResamplingResult:
        """Ask for what is planned, and return what has come of it; `waiting` are the alias's sealed trajectories."""
        self._collect(now)
        planned = self._cancel_outdated(self._waiting(), now)
        company = ResamplingResult()
        for original, among in groupby(planned, key=lambda one: one.original_id):
            self._join(original, list(among), shipped_until, company)
        known = {one.id for one in planned}
        self._put_aside([run.id for run in waiting if run.purpose == RESAMPLE], known, company)
        unasked = [one for one in planned if one.state is ResampleState.PLANNED and one.id not in self._asked]
        self._unasked = len(unasked) - self._ask(unasked, now)
        return company

    def _waiting(self) -> list[Resample]:
        """Return the resamples of originals that wait. Only the leader plans, so it is read in whole but once."""
        planned = self._store.resamples.pending(self._alias, self._originals)
        self._originals = {one.original_id for one in planned}
        return planned

    def take(self, alone: Sequence[Trajectory], lonely: Set[str], since: float, now: float) -> set[str]:
        """Plan resamples for some of those that found no company; return who is to wait for them, or for their turn.

        Who was alone at `since` (Unix seconds) already has waited for its turn long enough.
        """
        settings, kept = self._settings, set[str]()
        if not settings.samples:
            return kept
        live = self._store.policies.live().get(self._alias)
        room = settings.concurrency - len(self._asked) - self._unasked
        for run in sorted(alone, key=lambda one: one.last_active_at, reverse=True):
            if run.calls != 1 or live is None or run.version != live.version or run.id in lonely | self._unfit.keys():
                continue
            if room > 0 and self._plan(run, now):
                room -= settings.samples
                kept.add(run.id)
            elif run.id not in self._unfit and (run.sealed_at or run.last_active_at) > since:
                kept.add(run.id)
        return kept

    def _plan(self, run: Trajectory, now: float) -> bool:
        """Plan the resamples of a trajectory, if there is a moment for them and it can be asked again."""
        if now < self._not_before or not self._pace(now):
            return False
        call = resample_request.find_single_call(self._store.trajectories.read(run.id))
        if call is not None:
            with contextlib.suppress(InvalidTransition):  # it had its resamples, and was gone from here since
                self._store.resamples.plan(
                    run, self._settings.samples, call.prompt_tokens + call.completion_tokens, now
                )
                self._originals = {*(self._originals or ()), run.id}
                return True
        while len(self._unfit) >= _MAX_UNFIT:
            del self._unfit[next(iter(self._unfit))]
        self._unfit[run.id] = None
        return False

    def _collect(self, now: float) -> None:
        """Hear how the calls ended."""
        for name in [name for name, (_, future) in self._asked.items() if future.done()]:
            _, future = self._asked.pop(name)
            try:
                outcome = future.result()
            except StoreError as error:  # its end is not written down: the next look gives it up
                outcome = Outcome(failure=str(error))
            if outcome.busy:
                self._not_before = now + _BUSY_PAUSE_SECONDS
            self._tell(name, outcome, now)

    def _tell(self, name: str, outcome: Outcome, now: float) -> None:
        alarm = f"shadow:{self._alias}"
        if outcome.failure is None:
            if outcome.busy:
                self._alarm_if_always_busy(alarm, outcome.others, now)
            else:
                self._failures = 0
                self._busy_period.still()
                self._store.alarms.clear(alarm)
            return
        self._failures += 1
        log.warning("event=shadow_failed shadow=%s reason=%r", name, outcome.failure)
        if self._failures >= _FAILURES:
            reason = f"the last {self._failures} shadow calls came to nothing: {outcome.failure}"
            self._store.alarms.raise_(alarm, reason)

    def _alarm_if_always_busy(self, alarm: str, others: int, now: float) -> None:
        self._busy_period.saw(others, now)
        hungry = self._busy_period.seconds(now)
        if 2 * hungry >= self._settings.max_wait_seconds:  # later, what waits now is given up
            reason = f"no shadow call found an idle moment for {hungry:.0f} s"
            self._store.alarms.raise_(alarm, f"{reason}: {self._busy_period.told(self._settings.max_running_requests)}")

    def _cancel_outdated(self, planned: Sequence[Resample], now: float) -> list[Resample]:
        """Give up what nobody asks for any more; return the others, and those that are over."""
        left = []
        live = self._store.policies.live().get(self._alias) if planned else None
        for one in planned:
            reason = self._cancel_reason(one, live.version if live else None, now)
            if reason is not None:
                self._store.resamples.mark_failed(one.id, now, reason)
                one = self._store.resamples.get(one.id)
            left.append(one)
        return left

    def _cancel_reason(self, one: Resample, live: int | None, now: float) -> str | None:
        if one.over or one.id in self._asked:
            return None
        if one.state is ResampleState.REQUESTED:
            return "the trainer was stopped while it was asked for"
        if not self._settings.samples:
            return "shadow re-sampling was switched off (trainer.resample.samples)"
        if one.version != live:
            return f"version {one.version} is not live any more"
        if now - one.planned_at > self._settings.max_wait_seconds:
            return f"vLLM was not idle for {self._settings.max_wait_seconds:g} s (trainer.resample.max_wait_seconds)"
        return None

    def _join(self, original: str, among: list[Resample], shipped_until: float, company: ResamplingResult) -> None:
        """Make a group of an original whose resamples are over and shipped, or let it go."""
        answered = [one for one in among if one.state is ResampleState.ANSWERED]
        shipped = all((one.ended_at or 0.0) < shipped_until for one in answered)
        if not shipped or not all(one.over for one in among):
            company.held.add(original)
            return
        run = self._store.trajectories.get(original)
        call = resample_request.find_single_call(self._store.trajectories.read(original))
        sealed = self._store.resamples.sealed_of(original)
        alike = [
            name
            for name in sealed
            if call and resample_request.is_same_prompt(call, self._store.trajectories.read(name))
        ]
        enough = len(alike) + 1 >= self._least
        if alike and enough:
            company.held.add(original)
            company.groups.append(PlannedGroup(run.group_key, self._alias, (original, *alike)))
        else:
            company.lonely.add(original)
        company.drops += [(name, DropReason.RESAMPLE_PROMPT_MISMATCH) for name in sealed if name not in alike]
        company.drops += [(name, DropReason.RESAMPLE_UNMATCHED) for name in alike if not enough]

    def _put_aside(self, sealed: Sequence[str], known: Set[str], company: ResamplingResult) -> None:
        """Drop the resamples whose original went another way; delete those whose original was deleted."""
        strays = [name for name in sealed if name not in known]
        originals = self._store.resamples.originals_of(strays) if strays else {}
        for name in strays:
            if name in originals:
                company.drops.append((name, DropReason.RESAMPLE_UNMATCHED))
            else:
                self._store.deletions.delete(TrajectoryFilter(id=name), "its original was deleted", timeout_seconds=0.0)

    def _ask(self, unasked: Sequence[Resample], now: float) -> int:
        """Begin calls as far as pace and room allow; return how many."""
        begun = 0
        for one in unasked:
            if len(self._asked) >= self._settings.concurrency or now < self._not_before or not self._pace(now):
                break
            self._asked[one.id] = one, self._threads.submit(self._caller.ask, one)
            begun += 1
        return begun

    def _pace(self, now: float) -> bool:
        """Return whether a further call keeps to the rates; calls under way may not be written down yet."""
        settings = self._settings
        spent = self._store.resamples.usage_since(self._alias, now - _MINUTE)
        tokens = spent.tokens + sum(one.tokens for one, _ in self._asked.values())
        few = settings.tokens_per_minute is None or tokens < settings.tokens_per_minute
        return few and spent.count + len(self._asked) < settings.calls_per_minute
