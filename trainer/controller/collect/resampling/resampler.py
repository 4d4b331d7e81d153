"""Shadows of one alias: which singles get further answers, when they are asked for, and the groups that come of them.

Consumes single-call trajectories that found no company, and sealed shadows; produces groups of an original with its
shadows, as any group. Promises: an original waits at most twice `wait_seconds` for an idle vLLM and then goes the way
of every single; rates are counted in the store, so that a restart does not double them; a shadow that cannot be
compared is dropped with its reason; one whose original was deleted is deleted. Off: whatever was planned is given up.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby

from ratchet.store.calls.resamples import Shadow
from ratchet.store.calls.trajectory_filter import Chosen
from ratchet.store.errors import ForbiddenChange, StoreError
from ratchet.store.records import SHADOW, Trajectory
from ratchet.store.states import ShadowState
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_load import Hunger, Load
from ratchet.trainer.controller.collect.grouping import PlannedGroup
from ratchet.trainer.controller.collect.resampling import resample_request
from ratchet.trainer.controller.collect.resampling.resample_call import Outcome, ShadowCaller
from ratchet.trainer.settings.resampling_settings import ShadowSettings

log = logging.getLogger(__name__)

ALONE = "resample_unmatched"  # what it was to be compared with has gone, or there were too few like it
UNLIKE = "resample_prompt_mismatch"  # not one whole answer to the very tokens of the original's prompt
_MINUTE = 60.0
_BUSY_PAUSE = 0.5  # seconds until a busy vLLM is looked at again
_FAILURES = 3  # in a row that are an alarm
_UNFIT_REMEMBERED = 10_000  # trajectories


@dataclass(slots=True)
class Company:
    """What became of shadows: groups and drops; `held` wait or were grouped here, `lonely` got nobody."""

    groups: list[PlannedGroup] = field(default_factory=list)
    drops: list[tuple[str, str]] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    lonely: set[str] = field(default_factory=set)


class Shadowing:
    """The shadow re-sampling of one alias. Every verb but the calls themselves returns at once."""

    def __init__(
        self,
        store: Store,
        alias: str,
        settings: ShadowSettings,
        *,
        least: int,
        key: str | None,
        load: Callable[[], Load],
    ) -> None:
        self._store = store
        self._alias = alias
        self._settings = settings
        self._least = least
        self._caller = ShadowCaller(store, settings, key, load)
        self._threads = ThreadPoolExecutor(settings.at_once, thread_name_prefix="shadow")
        self._asked: dict[str, tuple[Shadow, Future[Outcome]]] = {}
        self._unasked = 0  # that are planned
        self._originals: set[str] | None = None  # that wait for shadows; None: not read from the store yet
        self._unfit: dict[str, None] = {}  # trajectories that cannot be asked again
        self._not_before = 0.0
        self._failures = 0  # in a row
        self._hunger = Hunger()

    def close(self) -> None:
        """Ask no more; what is under way is given up at the next start."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._caller.close()

    def seal(self, shipped_until: float) -> None:
        """Seal the trajectories of shadows that are over, while any are waited for."""
        if self._originals is None or self._originals:
            self._store.shadows.seal(self._alias, shipped_until)

    def look(self, waiting: Sequence[Trajectory], shipped_until: float, now: float) -> Company:
        """Ask for what is planned, and return what has come of it; `waiting` are the alias's sealed trajectories."""
        self._collect(now)
        planned = self._up_to_date(self._waiting(), now)
        company = Company()
        for original, among in groupby(planned, key=lambda one: one.original_id):
            self._join(original, list(among), shipped_until, company)
        known = {one.id for one in planned}
        self._put_aside([run.id for run in waiting if run.purpose == SHADOW], known, company)
        unasked = [one for one in planned if one.state is ShadowState.PLANNED and one.id not in self._asked]
        self._unasked = len(unasked) - self._ask(unasked, now)
        return company

    def _waiting(self) -> list[Shadow]:
        """Return the shadows of originals that wait. Only the leader plans, so it is read in whole but once."""
        planned = self._store.shadows.waiting(self._alias, self._originals)
        self._originals = {one.original_id for one in planned}
        return planned

    def take(self, alone: Sequence[Trajectory], lonely: Set[str], since: float, now: float) -> set[str]:
        """Plan shadows for some of those that found no company; return who is to wait for them, or for their turn.

        Who was alone at `since` (Unix seconds) already has waited for its turn long enough.
        """
        settings, kept = self._settings, set[str]()
        if not settings.samples:
            return kept
        live = self._store.policies.live().get(self._alias)
        room = settings.at_once - len(self._asked) - self._unasked
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
        """Plan the shadows of a trajectory, if there is a moment for them and it can be asked again."""
        if now < self._not_before or not self._pace(now):
            return False
        call = resample_request.only_call(self._store.trajectories.read(run.id))
        if call is not None:
            with contextlib.suppress(ForbiddenChange):  # it had its shadows, and was gone from here since
                self._store.shadows.plan(run, self._settings.samples, call.prompt_tokens + call.completion_tokens, now)
                self._originals = {*(self._originals or ()), run.id}
                return True
        while len(self._unfit) >= _UNFIT_REMEMBERED:
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
                self._not_before = now + _BUSY_PAUSE
            self._tell(name, outcome, now)

    def _tell(self, name: str, outcome: Outcome, now: float) -> None:
        alarm = f"shadow:{self._alias}"
        if outcome.failure is None:
            if outcome.busy:
                self._warn_of_hunger(alarm, outcome.others, now)
            else:
                self._failures = 0
                self._hunger.still()
                self._store.alarms.clear(alarm)
            return
        self._failures += 1
        log.warning("event=shadow_failed shadow=%s reason=%r", name, outcome.failure)
        if self._failures >= _FAILURES:
            reason = f"the last {self._failures} shadow calls came to nothing: {outcome.failure}"
            self._store.alarms.raise_(alarm, reason)

    def _warn_of_hunger(self, alarm: str, others: int, now: float) -> None:
        self._hunger.saw(others, now)
        hungry = self._hunger.seconds(now)
        if 2 * hungry >= self._settings.wait_seconds:  # later, what waits now is given up
            reason = f"no shadow call found an idle moment for {hungry:.0f} s"
            self._store.alarms.raise_(alarm, f"{reason}: {self._hunger.told(self._settings.max_running_requests)}")

    def _up_to_date(self, planned: Sequence[Shadow], now: float) -> list[Shadow]:
        """Give up what nobody asks for any more; return the others, and those that are over."""
        left = []
        live = self._store.policies.live().get(self._alias) if planned else None
        for one in planned:
            reason = self._why_given_up(one, live.version if live else None, now)
            if reason is not None:
                self._store.shadows.fail(one.id, now, reason)
                one = self._store.shadows.get(one.id)
            left.append(one)
        return left

    def _why_given_up(self, one: Shadow, live: int | None, now: float) -> str | None:
        if one.over or one.id in self._asked:
            return None
        if one.state is ShadowState.ASKED:
            return "the trainer was stopped while it was asked for"
        if not self._settings.samples:
            return "shadow re-sampling was switched off (trainer.resample.samples)"
        if one.version != live:
            return f"version {one.version} is not live any more"
        if now - one.planned_at > self._settings.wait_seconds:
            return f"vLLM was not idle for {self._settings.wait_seconds:g} s (trainer.resample.wait_seconds)"
        return None

    def _join(self, original: str, among: list[Shadow], shipped_until: float, company: Company) -> None:
        """Make a group of an original whose shadows are over and shipped, or let it go."""
        answered = [one for one in among if one.state is ShadowState.ANSWERED]
        shipped = all((one.ended_at or 0.0) < shipped_until for one in answered)
        if not shipped or not all(one.over for one in among):
            company.held.add(original)
            return
        run = self._store.trajectories.get(original)
        call = resample_request.only_call(self._store.trajectories.read(original))
        sealed = self._store.shadows.sealed(original)
        alike = [
            name for name in sealed if call and resample_request.is_like(call, self._store.trajectories.read(name))
        ]
        enough = len(alike) + 1 >= self._least
        if alike and enough:
            company.held.add(original)
            company.groups.append(PlannedGroup(run.group_key, self._alias, (original, *alike)))
        else:
            company.lonely.add(original)
        company.drops += [(name, UNLIKE) for name in sealed if name not in alike]
        company.drops += [(name, ALONE) for name in alike if not enough]

    def _put_aside(self, sealed: Sequence[str], known: Set[str], company: Company) -> None:
        """Drop the shadows whose original went another way; delete those whose original was deleted."""
        strays = [name for name in sealed if name not in known]
        originals = self._store.shadows.originals(strays) if strays else {}
        for name in strays:
            if name in originals:
                company.drops.append((name, ALONE))
            else:
                self._store.deletions.delete(Chosen(id=name), "its original was deleted", patience=0.0)

    def _ask(self, unasked: Sequence[Shadow], now: float) -> int:
        """Begin calls as far as pace and room allow; return how many."""
        begun = 0
        for one in unasked:
            if len(self._asked) >= self._settings.at_once or now < self._not_before or not self._pace(now):
                break
            self._asked[one.id] = one, self._threads.submit(self._caller.ask, one)
            begun += 1
        return begun

    def _pace(self, now: float) -> bool:
        """Return whether a further call keeps to the rates; calls under way may not be written down yet."""
        settings = self._settings
        spent = self._store.shadows.spent(self._alias, now - _MINUTE)
        tokens = spent.tokens + sum(one.tokens for one, _ in self._asked.values())
        few = settings.tokens_per_minute is None or tokens < settings.tokens_per_minute
        return few and spent.shadows + len(self._asked) < settings.calls_per_minute
