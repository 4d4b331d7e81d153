"""Rollouts: run a workflow on tasks through the proxy, many at once. Each is recorded as an ordinary trajectory.

The trajectory id is chosen here and is part of the base URL, so the agent needs no header. The store knows the rollout
before it starts. Guarantees: a failed rollout is kept with its exception, never skipped; finished rollouts are stored
even if the run is interrupted, and only those in progress are lost (they stay `planned`); a retry is a rollout of its
own, and the last one counts. A run stops if more rollouts fail than `tuner.max_failures` allows, or all of the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import sysconfig
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ratchet.store.ids import new_id
from ratchet.store.operation_records import Rollout, TaskRow
from ratchet.store.states import RolloutState
from ratchet.store.store import Store
from ratchet.trainer.errors import TooManyFailures, WorkflowFailed
from ratchet.trainer.observability.progress import Phase, Progress
from ratchet.trainer.tasks import Task
from ratchet.trainer.user_code import guarded_task
from ratchet.tuner.rollouts.workflow import Workflow, WorkflowInput
from ratchet.tuner.settings import TunerSettings

_Written = TypeVar("_Written")

ROLLOUTS = "rollouts"  # name of the progress bar
NO_KEY = "none"  # sent if the proxy needs no key, because clients require one
_CHECK_SECONDS = 1.0  # between two calls of `check` while rollouts run
_PLANNED_AHEAD = 256  # rollouts planned by one write
_MAX_UNWRITTEN = 256  # finished rollouts not yet stored
_MAX_FAILURE_CHARS = 2000  # characters
_FIRST = 16  # rollouts of which one must succeed if `max_failures` is null
_SHOWN = 3  # different failures in a message
# Files that are not the agent's: an exception is reported at the last frame outside of them.
_NOT_AGENT_CODE = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<")


@dataclass(frozen=True, slots=True)
class RolloutJob:
    """A rollout to run."""

    task: Task
    attempt: int = 0
    candidate: str = ""  # the compared model, prompt or version
    model: str | None = None  # served whatever model the agent requests; None: the requested one
    purpose: str = "eval"  # live: may be trained; gathered: trained on request; eval: never trained
    prompt_id: str | None = None  # of the prompt that replaces the agent's
    system_prompt: str | None = None  # its text, for workflows with this parameter
    scenario: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0

    @property
    def key(self) -> tuple[str, str, int, int]:
        """Identity of the job: equal keys mean the same job."""
        return self.candidate, self.task.id, self.attempt, self.step


@dataclass(eq=False, repr=False)
class RolloutRunner:
    """Runs one workflow through one proxy, which must use the same store.

    `check` is called before each rollout and once a second, and raises if the run must stop. With `keep_stdout`, what
    functions print goes to standard error, so that a command's standard output holds its data only.
    """

    store: Store
    proxy_url: str
    api_key: str | None
    workflow: Workflow
    settings: TunerSettings
    _: KW_ONLY
    alias: str = "policy"
    progress: Progress = field(default_factory=Progress)
    check: Callable[[], None] = lambda: None
    keep_stdout: bool = True
    families: Mapping[str, Workflow] = field(default_factory=dict)  # of tasks with the ids `FAMILY/...`

    def __post_init__(self) -> None:
        self._failures = _Failures()
        self._proxy_url = self.proxy_url.rstrip("/").removesuffix("/v1")
        self._api_key = self.api_key or NO_KEY

    async def run(
        self, jobs: Sequence[RolloutJob], tuning_id: str, on_end: Callable[[Rollout], object] | None = None
    ) -> list[Rollout]:
        """Return the rollout of each job, in order; `on_end` is called with each one that ends.

        Raises TooManyFailures.
        """
        failures = (self._failures, _Failures())
        asyncio.get_running_loop().set_task_factory(guarded_task)  # also in tasks that agents create
        state = _RunState(self.store, jobs, tuning_id, self.progress.begin(ROLLOUTS, len(jobs)), on_end, failures)
        await state.write(self._remember, jobs)
        workers = [asyncio.create_task(self._work(state)) for _ in range(min(self.settings.concurrency, len(jobs)))]
        try:
            with contextlib.redirect_stdout(sys.stderr) if self.keep_stdout else contextlib.nullcontext():
                await self._watched(workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            try:
                await state.written()
            finally:
                state.end()
        return [state.ended[number] for number in range(len(jobs))]

    async def _watched(self, workers: Iterable[asyncio.Task[None]]) -> None:
        """Wait for the workers' end. Raises the first error of one, and that of `check`."""
        running = set(workers)
        while running:
            ended, running = await asyncio.wait(running, timeout=_CHECK_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
            for worker in ended:
                worker.result()
            self.check()

    def _remember(self, jobs: Sequence[RolloutJob]) -> None:
        tasks = {job.task.id: job.task for job in jobs}.values()
        self.store.tasks.register(
            TaskRow(id=one.id, task_set=one.set, split=one.split, content=one.row) for one in tasks
        )

    async def _work(self, state: _RunState) -> None:
        while (planned := await state.next()) is not None:
            self.check()
            number, rollout = planned
            job = state.jobs[number]
            failed = await self._run_attempt(state, number, rollout, last=not self.settings.max_retries)
            for again in range(1, self.settings.max_retries + 1):
                if not failed:
                    break
                rollout = plan_rollout(job, state.tuning_id, scenario={**job.scenario, "retry": again})
                await state.write(self.store.rollouts.plan, [rollout])
                failed = await self._run_attempt(state, number, rollout, last=again == self.settings.max_retries)
            self._check_failures(state)

    def _check_failures(self, state: _RunState) -> None:
        """Raise TooManyFailures if too many rollouts of this call failed, or all of the runner's first ones."""
        limit, (first, ours) = self.settings.max_failures, state.failures
        failed, kept = ours.failed.total(), f"finished rollouts are kept in tuning {state.tuning_id}"
        if limit is None:
            if first.finished == first.failed.total() >= _FIRST:
                raise TooManyFailures(
                    f"stopped: all of the first {first.finished} rollouts failed, {first.describe()}; fix the workflow "
                    f"(`ratchet doctor --workflow` tests it), or set tuner.max_failures to continue anyway; {kept}"
                )
        elif failed > (limit * len(state.jobs) if 0 < limit < 1 else limit):
            counts = f"{failed} of {ours.finished} rollouts failed (max_failures {limit})"
            raise TooManyFailures(f"stopped: {counts}, {ours.describe()}; {kept}")

    async def _run_attempt(self, state: _RunState, number: int, rollout: Rollout, last: bool) -> bool:
        """Run the workflow once and store the result; return whether it failed."""
        job, began = state.jobs[number], time.time()
        limit = asyncio.timeout(self.settings.timeout_seconds)
        workflow = self.families.get(job.task.id.rpartition("/")[0], self.workflow)
        try:
            async with limit:
                url, model, seed = (
                    f"{self._proxy_url}/t/{rollout.id}/v1",
                    job.model or self.alias,
                    job.scenario.get("seed"),
                )
                outcome = await workflow.run(
                    WorkflowInput(job.task.row, url, self._api_key, model, job.system_prompt, seed)
                )
        except asyncio.CancelledError as error:
            if (me := asyncio.current_task()) is not None and me.cancelling():
                raise
            failure = describe_error(error)
        except Exception as error:  # noqa: BLE001  any exception of the agent is a failed rollout
            late = f"TimeoutError: the rollout exceeded {self.settings.timeout_seconds:g} s (tuner.timeout_seconds)"
            failure = late if limit.expired() and isinstance(error, TimeoutError) else describe_error(error)
        else:
            values = {"response": outcome.text, "reward": outcome.reward, "metrics": outcome.metrics}
            await state.close(number, _finished(rollout, RolloutState.ENDED, began, **values))
            return False
        await state.close(number if last else None, _finished(rollout, RolloutState.FAILED, began, failure=failure))
        return True


def _finished(rollout: Rollout, state: RolloutState, began: float, **values: Any) -> Rollout:
    return msgspec.structs.replace(rollout, state=state, started_at=began, ended_at=time.time(), **values)


@dataclass(slots=True)
class _Failures:
    """Counts finished rollouts, and the failures among them."""

    failed: Counter[str] = field(default_factory=Counter)
    finished: int = 0

    def record(self, failure: str | None) -> None:
        self.finished += 1
        if failure is not None:
            self.failed[failure] += 1

    def describe(self) -> str:
        """Return the commonest failures with their counts."""
        text = "; ".join(f"{times} of them with {failure}" for failure, times in self.failed.most_common(_SHOWN))
        others = len(self.failed) - _SHOWN
        return text + (f"; and {others} other failures" if others > 0 else "")


@dataclass
class _RunState:
    """State of one call of `run`: pending, finished and failed rollouts."""

    store: Store
    jobs: Sequence[RolloutJob]
    tuning_id: str
    work: Phase
    on_end: Callable[[Rollout], object] | None
    failures: tuple[_Failures, _Failures]

    def __post_init__(self) -> None:
        self.ended: dict[int, Rollout] = {}
        self._upcoming: Iterator[tuple[int, Rollout]] = iter(())
        self._planned = 0
        self._lock = asyncio.Lock()
        self._unwritten: list[tuple[int | None, Rollout]] = []
        self._writing: asyncio.Task[None] | None = None
        self._writer = ThreadPoolExecutor(1, "rollouts")

    async def write(self, write: Callable[..., _Written], *values: Any) -> _Written:
        """Call a store method outside the event loop; it completes even if the caller is cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, write, *values)

    async def next(self) -> tuple[int, Rollout] | None:
        """Return the number and the stored rollout of the next job; None at the end."""
        async with self._lock:
            found = next(self._upcoming, None)
            if found is None and self._planned < len(self.jobs):
                numbers = range(self._planned, min(self._planned + _PLANNED_AHEAD, len(self.jobs)))
                some = [plan_rollout(self.jobs[number], self.tuning_id) for number in numbers]
                await self.write(self.store.rollouts.plan, some)
                self._planned = numbers.stop
                self._upcoming = iter(zip(numbers, some, strict=True))
                found = next(self._upcoming)
            return found

    async def close(self, number: int | None, over: Rollout) -> None:
        """Store the end of a rollout in the background; `number` is the job that it completes, if any.

        Waits if the store is far behind. Raises the store's errors on earlier rollouts.
        """
        if number is not None:
            for one in self.failures:
                one.record(over.failure)
        self._unwritten.append((number, over))
        if self._writing is None or self._writing.done():
            await self.written()
            self._writing = asyncio.create_task(self._write_ends())
        elif len(self._unwritten) > _MAX_UNWRITTEN:
            await self.written()

    async def _write_ends(self) -> None:
        while self._unwritten:
            some, self._unwritten = self._unwritten, []
            await self.write(self.store.rollouts.end_all, [over for _, over in some])
            for number, over in some:
                if number is not None:
                    self._count(number, over)

    def _count(self, number: int, rollout: Rollout) -> None:
        self.ended[number] = rollout
        failed = rollout.state is RolloutState.FAILED
        reward = {} if rollout.reward is None else {"reward": rollout.reward}
        seconds = (rollout.ended_at or 0.0) - (rollout.started_at or 0.0)
        self.work.add(failed=float(failed), seconds=seconds, **reward)
        if self.on_end is not None:
            self.on_end(rollout)

    async def written(self) -> None:
        """Wait until every finished rollout is stored. Raises the store's errors."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    def end(self) -> None:
        """Finish pending writes and close the progress bar."""
        self._writer.shutdown()
        self.work.end()


def plan_rollout(job: RolloutJob, tuning_id: str, scenario: Mapping[str, Any] | None = None) -> Rollout:
    return Rollout(
        id=new_id("roll"), tuning_id=tuning_id, task_id=job.task.id, split=job.task.split, attempt=job.attempt,
        candidate=job.candidate, model=job.model, purpose=job.purpose, prompt_id=job.prompt_id, step=job.step,
        scenario=job.scenario if scenario is None else scenario, planned_at=time.time(),
    )  # fmt: skip


def describe_error(error: BaseException) -> str:
    """Return an exception as one line with the file and line in the agent's code.

    For an exception group, the first exception: the group's message only counts them.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [frame for frame in frames if not frame[0].startswith(_NOT_AGENT_CODE) and "site-packages" not in frame[0]]
    has_place = frames and not isinstance(error, WorkflowFailed)  # that one reports a program's output
    where = " ({}:{})".format(*(own or frames)[-1]) if has_place else ""
    return f"{type(error).__name__}: {_message(error)[:_MAX_FAILURE_CHARS]}{where}"


def _message(error: BaseException) -> str:
    try:
        return " ".join(str(error).split())
    except Exception as broken:  # noqa: BLE001  the agent's exception class may be broken
        return f"(its message cannot be read: {type(broken).__name__})"


def key_of(one: Rollout) -> tuple[str, str, int, int]:
    return one.candidate, one.task_id, one.attempt, one.step


def final_rollouts(rollouts: Iterable[Rollout], jobs: Iterable[RolloutJob] | None = None) -> list[Rollout]:
    """Return the finished rollouts, of these jobs if any are given; of several for the same job, the last one."""
    last = {key_of(one): one for one in sorted(rollouts, key=lambda one: one.planned_at) if one.counts}
    keys = last.keys() if jobs is None else {job.key for job in jobs}
    return [one for key, one in last.items() if key in keys]


def pending_jobs(jobs: Iterable[RolloutJob], rollouts: Iterable[Rollout]) -> list[RolloutJob]:
    """Return the jobs without a finished rollout, to resume an interrupted run."""
    done = {key_of(one) for one in final_rollouts(rollouts)}
    return [job for job in jobs if job.key not in done]


def first_api_key() -> str | None:
    """Return the API key of the rollouts: the first of RATCHET_API_KEYS."""
    return os.environ.get("RATCHET_API_KEYS", "").split(",")[0].strip() or None
