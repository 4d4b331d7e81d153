"""Rollouts: a workflow run on tasks through the proxy, many at once; each is an ordinary captured trajectory.

Its id is chosen here and is part of its base URL, so that the agent needs no header; what the proxy must know of it is
in the store before it begins. Promises: a failed rollout stays, with its exception, and is never skipped; what ended is
written, also where the run is interrupted: only what was under way is lost (it stays `planned`); a retry is a rollout
of its own, and the last one counts. What a function prints goes to the standard error meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ratchet.store.ids import new_id
from ratchet.store.records.tuning import Rollout, TaskRow
from ratchet.store.states import RolloutState
from ratchet.store.store import Store
from ratchet.trainer.errors import WorkflowFailed
from ratchet.trainer.observability.progress import Progress, Work
from ratchet.trainer.tasks.task_set import Task
from ratchet.trainer.user_code.exit_guard import exits_raise
from ratchet.tuner.rollouts.failure_limit import Failures, FirstRollouts
from ratchet.tuner.rollouts.workflow import Workflow
from ratchet.tuner.settings.tuner_settings import TunerSettings

_Written = TypeVar("_Written")

ROLLOUTS = "rollouts"  # the work that progress is told of
NO_KEY = "none"  # sent where the proxy asks for no key: clients insist on one
_PLANNED_AHEAD = 256  # rollouts that one write plans
_MOST_UNWRITTEN = 256  # rollouts that ended, and whose end the store does not know yet
_LONGEST_FAILURE = 2000  # characters
# Files in which an exception may be raised, and which no agent's author would look into.
_NOT_THE_AGENTS = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<")


@dataclass(frozen=True, slots=True)
class RolloutJob:
    """One rollout to be made."""

    task: Task
    attempt: int = 0
    candidate: str = ""  # what is compared: a model, a prompt, a version
    model: str | None = None  # served whatever the agent asks for; None: what it asks for
    purpose: str = "eval"  # live: may be trained; eval: never
    prompt_id: str | None = None  # of the prompt that the proxy swaps in
    system_prompt: str | None = None  # its text, for a workflow that takes it
    scenario: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0

    @property
    def place(self) -> tuple[str, str, int, int]:
        """What makes it the same job as another one."""
        return self.candidate, self.task.id, self.attempt, self.step


class RolloutRunner:
    """Makes rollouts of one workflow through one proxy. The store is the proxy's.

    `check` is called before each rollout, and raises where no further one may begin.
    """

    def __init__(
        self,
        store: Store,
        proxy_url: str,
        api_key: str | None,
        workflow: Workflow,
        settings: TunerSettings,
        *,
        alias: str = "policy",
        progress: Progress | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._check = check
        self._beginning = FirstRollouts()
        self._proxy_url = proxy_url.rstrip("/").removesuffix("/v1")
        self._api_key = api_key or NO_KEY
        self._workflow = workflow
        self._settings = settings
        self._alias = alias
        self._progress = progress or Progress()

    async def run(
        self, jobs: Sequence[RolloutJob], tuning_id: str, on_end: Callable[[Rollout], object] | None = None
    ) -> list[Rollout]:
        """Return the rollout of each job, in their order; `on_end` sees each as it ends. Raises TooManyFailures."""
        failures = Failures(self._settings, len(jobs), tuning_id, self._beginning)
        asyncio.get_running_loop().set_task_factory(exits_raise)  # the agents' own tasks among them
        course = _Course(self._store, jobs, tuning_id, self._progress.begin(ROLLOUTS, len(jobs)), on_end, failures)
        await course.write(self._remember, jobs)
        workers = [asyncio.create_task(self._work(course)) for _ in range(min(self._settings.concurrency, len(jobs)))]
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what agents print; the command's data may go there
                await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            try:
                await course.written()
            finally:
                course.end()
        return [course.ended[number] for number in range(len(jobs))]

    def _remember(self, jobs: Sequence[RolloutJob]) -> None:
        tasks = {job.task.id: job.task for job in jobs}.values()
        self._store.tasks.register(
            TaskRow(id=one.id, task_set=one.set, split=one.split, content=one.row) for one in tasks
        )

    async def _work(self, course: _Course) -> None:
        while (planned := await course.next()) is not None:
            self._check()
            number, rollout = planned
            job = course.jobs[number]
            failed = await self._once(course, number, rollout, last=not self._settings.max_retries)
            for again in range(1, self._settings.max_retries + 1):
                if not failed:
                    break
                rollout = plan_rollout(job, course.tuning_id, scenario={**job.scenario, "retry": again})
                await course.write(self._store.rollouts.plan, [rollout])
                failed = await self._once(course, number, rollout, last=again == self._settings.max_retries)
            course.failures.check()

    async def _once(self, course: _Course, number: int, rollout: Rollout, last: bool) -> bool:
        """Run the workflow once and have its end written down; return whether it failed."""
        job, began = course.jobs[number], time.time()
        limit = asyncio.timeout(self._settings.timeout_seconds)
        try:
            async with limit:
                outcome = await self._workflow.run(
                    job.task.row,
                    base_url=f"{self._proxy_url}/t/{rollout.id}/v1",
                    api_key=self._api_key,
                    model=job.model or self._alias,
                    system_prompt=job.system_prompt,
                    seed=job.scenario.get("seed"),
                )
        except asyncio.CancelledError as error:
            if (me := asyncio.current_task()) is not None and me.cancelling():
                raise
            failure = told(error)
        except Exception as error:  # noqa: BLE001  whatever the agent raises is how its rollout failed
            late = f"TimeoutError: it took longer than {self._settings.timeout_seconds:g} s (tuner.timeout_seconds)"
            failure = late if limit.expired() and isinstance(error, TimeoutError) else told(error)
        else:
            told_by = {"response": outcome.text, "reward": outcome.reward, "metrics": outcome.metrics}
            await course.close(number, _over(rollout, RolloutState.ENDED, began, **told_by))
            return False
        await course.close(number if last else None, _over(rollout, RolloutState.FAILED, began, failure=failure))
        return True


def _over(rollout: Rollout, state: RolloutState, began: float, **values: Any) -> Rollout:
    return msgspec.structs.replace(rollout, state=state, started_at=began, ended_at=time.time(), **values)


class _Course:
    """One run under way: what is still to be done, what ended, what failed."""

    def __init__(
        self,
        store: Store,
        jobs: Sequence[RolloutJob],
        tuning_id: str,
        work: Work,
        on_end: Callable[[Rollout], object] | None,
        failures: Failures,
    ) -> None:
        self.jobs = jobs
        self.tuning_id = tuning_id
        self.ended: dict[int, Rollout] = {}
        self.failures = failures
        self._store = store
        self._work = work
        self._on_end = on_end
        self._coming: Iterator[tuple[int, Rollout]] = iter(())
        self._planned = 0
        self._turn = asyncio.Lock()
        self._unwritten: list[tuple[int | None, Rollout]] = []
        self._writing: asyncio.Task[None] | None = None
        self._writer = ThreadPoolExecutor(1, "rollouts")

    async def write(self, write: Callable[..., _Written], *values: Any) -> _Written:
        """Do something to the store, off the event loop; it is done even if nobody waits for it any more."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, write, *values)

    async def next(self) -> tuple[int, Rollout] | None:
        """Return the next job's number and its rollout, which the store knows; None at the end."""
        async with self._turn:
            found = next(self._coming, None)
            if found is None and self._planned < len(self.jobs):
                numbers = range(self._planned, min(self._planned + _PLANNED_AHEAD, len(self.jobs)))
                some = [plan_rollout(self.jobs[number], self.tuning_id) for number in numbers]
                await self.write(self._store.rollouts.plan, some)
                self._planned = numbers.stop
                self._coming = iter(zip(numbers, some, strict=True))
                found = next(self._coming)
            return found

    async def close(self, number: int | None, over: Rollout) -> None:
        """Have the end of a rollout written down, without waiting for it; `number` is the job's that it ends.

        Waits where the store is far behind. Raises what the store raised on earlier ones.
        """
        if number is not None:
            self.failures.take(over.failure)
        self._unwritten.append((number, over))
        if self._writing is None or self._writing.done():
            await self.written()
            self._writing = asyncio.create_task(self._write_ends())
        elif len(self._unwritten) > _MOST_UNWRITTEN:
            await self.written()

    async def _write_ends(self) -> None:
        while self._unwritten:
            some, self._unwritten = self._unwritten, []
            await self.write(self._store.rollouts.end_all, [over for _, over in some])
            for number, over in some:
                if number is not None:
                    self._count(number, over)

    def _count(self, number: int, rollout: Rollout) -> None:
        self.ended[number] = rollout
        failed = rollout.state is RolloutState.FAILED
        reward = {} if rollout.reward is None else {"reward": rollout.reward}
        seconds = (rollout.ended_at or 0.0) - (rollout.started_at or 0.0)
        self._work.add(failed=float(failed), seconds=seconds, **reward)
        if self._on_end is not None:
            self._on_end(rollout)

    async def written(self) -> None:
        """Wait until every end so far is written. Raises what the store raised."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    def end(self) -> None:
        """Write what is still to be written; tell that it is over."""
        self._writer.shutdown()
        self._work.end()


def plan_rollout(job: RolloutJob, tuning_id: str, scenario: Mapping[str, Any] | None = None) -> Rollout:
    """Return the rollout of a job as it is planned."""
    return Rollout(
        id=new_id("roll"), tuning_id=tuning_id, task_id=job.task.id, split=job.task.split, attempt=job.attempt,
        candidate=job.candidate, model=job.model, purpose=job.purpose, prompt_id=job.prompt_id, step=job.step,
        scenario=job.scenario if scenario is None else scenario, planned_at=time.time(),
    )  # fmt: skip


def told(error: BaseException) -> str:
    """Return an exception as one sentence, with the place in the agent's code that it comes from.

    Of a group the first: its own words only say how many there are.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [frame for frame in frames if not frame[0].startswith(_NOT_THE_AGENTS) and "site-packages" not in frame[0]]
    has_place = frames and not isinstance(error, WorkflowFailed)  # which says what a program said, not where
    where = " ({}:{})".format(*(own or frames)[-1]) if has_place else ""
    return f"{type(error).__name__}: {_words(error)[:_LONGEST_FAILURE]}{where}"


def _words(error: BaseException) -> str:
    try:
        return " ".join(str(error).split())
    except Exception as broken:  # noqa: BLE001  an exception of the agent's own, whose words cannot be had
        return f"(its message cannot be read: {type(broken).__name__})"


def counting(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """Return the rollouts that count: over, and of several at the same job the last one."""
    last = {
        (one.candidate, one.task_id, one.attempt, one.step): one
        for one in sorted(rollouts, key=lambda one: one.planned_at)
        if one.counts
    }
    return list(last.values())


def left(jobs: Iterable[RolloutJob], rollouts: Iterable[Rollout]) -> list[RolloutJob]:
    """Return the jobs that no rollout has ended yet, to go on where a run was interrupted."""
    done = {(one.candidate, one.task_id, one.attempt, one.step) for one in counting(rollouts)}
    return [job for job in jobs if job.place not in done]


__all__ = ["RolloutJob", "RolloutRunner", "counting", "left"]
