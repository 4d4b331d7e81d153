"""Runs of the tuner in a thread of the caller's process, the handle on them, and the synchronous form of functions."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import io
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import msgspec

from ratchet.api import reports
from ratchet.api.arguments import Arguments
from ratchet.api.run_lease import RunCaller, interruption
from ratchet.errors import InvalidArgument, RunCancelled
from ratchet.settings.state_folder import current_user
from ratchet.store.operation_records import Tuning
from ratchet.store.states import RolloutState, TuningState
from ratchet.store.store import Store, open_store
from ratchet.trainer.adapters.adapter_store import AdapterStore
from ratchet.tuner.reports import TuningResult, read
from ratchet.tuner.selection import Selection

_P = ParamSpec("_P")
_T = TypeVar("_T")
_POLL = 0.05  # seconds


def synchronous(function: Callable[_P, Coroutine[Any, Any, _T]]) -> Callable[_P, _T]:
    """Return the synchronous form of an async function `NAME_async`: `NAME`, with its parameters, types and text."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{run.__name__}(): {error}") from None
        return run_to_end(function(*args, **kwargs))

    run.__name__ = run.__qualname__ = function.__name__.removesuffix("_async")
    return run


def run_to_end(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Return the coroutine's result. Ctrl-C cancels it, and waits until it has ended."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        is_loop_running = False
    else:
        is_loop_running = True
    return _in_a_thread(coroutine) if is_loop_running else asyncio.run(coroutine)


def _in_a_thread(coroutine: Coroutine[Any, Any, _T]) -> _T:
    cancel: list[Callable[[], object]] = []

    async def cancellable() -> _T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        cancel.append(lambda: loop.call_soon_threadsafe(task.cancel))
        return await coroutine

    with ThreadPoolExecutor(1, "ratchet") as thread:
        result = thread.submit(contextvars.copy_context().run, asyncio.run, cancellable())
        try:
            while not result.done():
                check_interrupted()
                wait([result], _POLL)
            return result.result()
        except KeyboardInterrupt:
            for end in cancel:
                end()
            raise


def check_interrupted() -> None:
    """Raise KeyboardInterrupt if Ctrl-C cancelled the task that calls this and blocks its event loop.

    `asyncio.run` handles Ctrl-C so: it cancels the main task, and raises nothing in code that does not await.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return
    if task is not None and task.cancelling():
        raise KeyboardInterrupt


Work = Callable[[RunCaller], object]


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The progress of a run.

    state     running, interrupted (its process is gone), stopped, failed or done
    rollouts  finished ones, failed ones included
    failed    rollouts that ended in an error
    error     why the run failed, or how to resume an interrupted one
    """

    state: str
    rollouts: int
    failed: int
    error: str | None


class TuningRun:
    """A run of `select_model`, `tune_prompt` or `tune`.

    It works in a thread of this process. The end of a `with` block cancels it unless it has ended, and so does Ctrl-C
    in `wait`. `await run` waits in an event loop. A run that ended early is resumed by its `id`: `resume=run.id`.
    """

    def __init__(self, given: Arguments, name: str | None = None) -> None:
        self._settings = given.settings
        self._functions = given.workflow, given.judge
        self._cancelled, self._id_known, self._has_ended = threading.Event(), threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._id = name or ""
        self._has_id = False

    @property
    def id(self) -> str:
        """The run's id, for `resume=` and `ratchet tune runs`."""
        return self._id

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until the run has ended, or for `timeout` seconds. Ctrl-C cancels it.

        Raises what ended the run early: RunCancelled if it was cancelled, TimeoutError if it goes on.
        """
        try:
            self._join(timeout)
        except KeyboardInterrupt:
            self.cancel()
            self._has_ended.wait()
            raise
        return self._ended(timeout)

    async def wait_async(self) -> Self:
        """Do what `wait` does, in the running event loop. A cancelled task cancels the run, and ends after it."""
        await self._wait_for(self._has_ended)
        return self._ended(None)

    def __await__(self) -> Generator[Any, None, Self]:
        return self.wait_async().__await__()

    def cancel(self) -> None:
        """Stop the run within seconds; finished rollouts are kept. Returns at once; `wait` waits for the end."""
        self._cancelled.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
        self._join(None)

    @property
    def status(self) -> RunStatus:
        """The progress of the run. Also while it runs."""
        with open_store(self._settings.store_url, create=False) as store:
            run, made = store.tunings.get(self._id), store.rollouts.of_tuning(self._id)
            interrupted = interruption(run, store.tunings.led())
        counts = [one for one in made if one.counts]
        failed = sum(one.state is RolloutState.FAILED for one in counts)
        state = str(run.state) if interrupted is None else "interrupted"
        return RunStatus(state, len(counts), failed, interrupted or run.error)

    @property
    def result(self) -> TuningResult:
        """What the run found and what it cost. Raises InvalidArgument unless it is done."""
        run = self._stored()
        if run.state is not TuningState.DONE:
            raise InvalidArgument(f"{self._id} is {run.state}: its result is there once it is done (`wait()`)")
        return read(run.result or {})

    @property
    def best(self) -> str | None:
        """The model that was chosen, the prompt's text, or the version; None: nothing is shown to be better."""
        result = self.result
        return str(result.details["prompt"]) if result.method == "prompt" and result.best else result.best

    def curve(self) -> list[Mapping[str, Any]]:
        """Return the evaluations on validation tasks so far, oldest first, of `tune`; else nothing. Also while it runs.

        Each has round, version, mean, low and high (95% interval), failed, unjudged and others.
        """
        run = self._stored()
        content = run.result or {}
        found = content["details"].get("curve", ()) if run.state is TuningState.DONE else content.get("evaluations", ())
        return [one for one in found if run.kind == "weights"]

    def report(self) -> str:
        """Return the result as text, as the command prints it. Raises InvalidArgument unless it is done."""
        result, text = self.result, io.StringIO()
        if result.method == "prompt":
            return "\n".join(reports.prompt_lines(self._id, result))
        if result.method == "weights":
            reports.show_weights(result, text)
        else:
            reports.show_selection(msgspec.convert(result.details, Selection), file=text)
        return text.getvalue()

    def promote(self, *, reason: str = "", force: bool = False, now: bool = False) -> str:
        """Release what the run found, and return it as `agent@version`.

        A prompt becomes a candidate, which the running trainer releases under its guard; with `now` it is live at once.
        A version that was chosen or trained is live at once. `force`: also a prompt that is not shown to be better.

        Raises InvalidArgument if there is nothing to release, CheckpointDamaged if the version's files are damaged.
        """
        result = self.result
        with open_store(self._settings.store_url, create=False) as store:
            if result.method == "prompt":
                name = create_candidate(store, self._id, force=force)
                if not now:
                    return name
            else:
                name = result.best or ""
            agent, _, version = name.partition("@")
            if not version:
                found = f"{name} is no version" if name else "nothing is shown to be better"
                raise InvalidArgument(f"{self._id} has no version to promote: {found}")
            live = store.policies.live().get(agent)
            if live is None or live.version != int(version):
                adapters = AdapterStore(self._settings.state.adapter_cache, self._settings.adapters.max_cache_bytes)
                store.policies.promote_manually(
                    agent, int(version), by=current_user(), reason=reason or f"run {self._id}", verify=adapters.verify
                )
        return name

    def rollback(self, version: int | None = None, *, reason: str = "", now: bool = False) -> str:
        """Roll the agent back as `ratchet policies rollback` does; return the live version as `agent@version`.

        version  go back to this one and reject every later one; None: reject the version in its ramp, else go back one
        now      open trajectories of the rejected versions go on with the live one

        Raises StoreError: there is nothing to roll back.
        """
        with open_store(self._settings.store_url, create=False) as store:
            agent = store.tunings.get(self._id).alias
            store.policies.roll_back_manually(
                agent, version, by=current_user(), reason=reason or f"run {self._id}", now=now
            )
            return f"{agent}@{store.policies.live()[agent].version}"

    def __repr__(self) -> str:
        return f"<ratchet.TuningRun {self._id}>"

    def _start(self, work: Work) -> Self:
        """Start the thread."""
        workflow, judge = self._functions
        caller = RunCaller(workflow, judge, cancelled=self._cancelled, started=self._set_id, in_python=True)

        def run() -> None:
            try:
                work(caller)
            except BaseException as error:  # noqa: BLE001  raised again in the thread that waits
                self._error = error
            finally:
                self._has_ended.set()
                self._id_known.set()

        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="ratchet run")
        self._thread.start()
        return self

    def _set_id(self, run: str) -> None:
        self._id, self._has_id = run, True
        self._id_known.set()

    async def _wait_for_id(self) -> Self:
        """Wait until the run has its id. Raises what prevents it from beginning."""
        await self._wait_for(self._id_known)
        return self if self._has_id else self._ended(None)

    async def _wait_for(self, event: threading.Event) -> None:
        """Wait in the event loop, if the run has been started. A cancelled task cancels the run, and ends after it."""
        try:
            while self._is_running and not event.is_set():
                await asyncio.sleep(_POLL)
        except asyncio.CancelledError:
            self.cancel()
            while self._is_running:
                await asyncio.sleep(_POLL)
            raise

    @property
    def _is_running(self) -> bool:
        return self._thread is not None and not self._has_ended.is_set()

    def _join(self, timeout: float | None) -> None:
        """Wait in short steps: a lock that is held for long defers Ctrl-C on some systems.

        Never with `Thread.join`: Ctrl-C during one makes Python 3.11 take the thread for ended (bpo-45274).
        """
        until = None if timeout is None else time.monotonic() + timeout
        while self._is_running and (until is None or time.monotonic() < until):
            check_interrupted()
            self._has_ended.wait(_POLL)

    def _ended(self, timeout: float | None) -> Self:
        if timeout is None:
            self._join(None)
        if self._is_running:
            raise TimeoutError(f"{self._id} has not ended after {timeout:g} s; it goes on")
        if isinstance(self._error, RunCancelled) and self._has_id:
            raise RunCancelled(f"{self._id} was cancelled: resume={self._id!r} continues it") from self._error
        if self._error is not None:
            raise self._error
        return self

    def _stored(self) -> Tuning:
        with open_store(self._settings.store_url, create=False) as store:
            return store.tunings.get(self._id)


async def start(given: Arguments, kind: str, resume: str | None, work: Work) -> TuningRun:
    """Start or resume a run; return when it has an id. A finished run is only looked at.

    Raises what prevents it from beginning.
    """
    if resume is None:
        return await TuningRun(given)._start(work)._wait_for_id()
    with open_store(given.settings.store_url, create=False) as store:
        run = store.tunings.get(resume)
    if run.kind != kind:
        raise InvalidArgument(f"resume={resume!r}: that run is a {run.kind} run")
    found = TuningRun(given, resume)
    return found if run.state is TuningState.DONE else await found._start(work)._wait_for_id()


def create_candidate(store: Store, name: str, *, force: bool = False) -> str:
    """Create a candidate version with a run's prompt; return `alias@version`. Raises InvalidArgument, StoreError."""
    run = store.tunings.get(name)
    details = (run.result or {}).get("details", {})
    if run.kind != "prompt" or run.state != "done":
        raise InvalidArgument(f"run {name} ({run.kind}, {run.state}) has no prompt to promote")
    if details["prompt_id"] is None:
        raise InvalidArgument(f"run {name} found no better prompt than its seed prompt")
    if (model := run.config.get("listed_model")) is not None:
        raise InvalidArgument(
            f"run {name} tuned the prompt of {model}, a model of model_list, which has no versions: give the prompt to "
            "your agent as its system prompt (--out FILE writes it; in Python run.best)"
        )
    if details["verdict"] != "better" and not force:
        raise InvalidArgument(
            f"run {name}: {details['verdict']}, {details['why']}; promote it anyway with --force (in Python force=True)"
        )
    evidence = {"tuning": name, "verdict": details["verdict"], "gain": (run.result or {}).get("gain")}
    policy = store.policies.register_prompt_version(run.alias, details["prompt_id"], evidence)
    return f"{policy.alias}@{policy.version}"
