"""`ratchet demo`: trains an unmodified agent and measures its improvement.

It starts the services like `up`, runs the agent (`ratchet.demo.email_search`, or with `--real` `ratchet.demo.reviews`)
as separate processes with only OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, and reads the store. The services have
no special case for it.

The exit code is 0 only if held-out success rose. Everything that it started is stopped, and the records stay in
`.ratchet/demo`, or `.ratchet/demo-real`. It does not touch other projects: it is always the project `demo` or
`demo-real` with its own SQLite store, and reads no RATCHET_* variables except secrets; it names those that it ignores.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratchet.demo import pretrained_model, report
from ratchet.errors import CliError
from ratchet.settings.load_settings import known_keys, load, setting_variables
from ratchet.settings.project_settings import SECRETS, Settings
from ratchet.settings.setting_errors import type_of_key
from ratchet.settings.state_folder import StateFolder
from ratchet.store.store import open_store
from ratchet.supervisor import signals, vllm_command
from ratchet.supervisor.pidfile import ProjectLock, stop_leftover_processes
from ratchet.supervisor.supervisor import Supervisor
from ratchet.supervisor.up import start_services
from ratchet.trainer.rounds.backlog import is_drained
from ratchet.tuner.rollouts.runner import first_api_key

_FOLDER = Path(__file__).parent
_MAIL = _FOLDER / "email_search"
TINY = _MAIL / "ratchet.yaml"
_SETTLE_SECONDS = 60.0  # at most, for the last round after the last rollout


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of a demo run; the defaults are those of the e-mail agent with the tiny policy."""

    seed: int = 1
    real: bool = False  # the agent that labels reviews, with a real pretrained model
    base_model: str | None = None  # None: the tiny policy of the package, or the real model, which is downloaded once
    rounds: int | None = 20  # each with `tasks_per_round` training tasks, `attempts` rollouts per task; None: no limit
    versions: int | None = None  # the training traffic ends once this version is live; only with `real`
    minutes: float | None = None  # of training traffic, at most; likewise
    tasks_per_round: int = 16
    attempts: int = 8
    concurrency: int = 32
    held_out_tasks: int = 150
    held_out_attempts: int = 2  # at temperature 1; the greedy run makes one attempt
    state_dir: Path | None = None  # folder of the state of all projects
    changes: Mapping[tuple[str, ...], Any] = field(default_factory=dict)  # settings that an experiment sets, by path

    @property
    def settings_file(self) -> Path:
        if self.real:
            return _FOLDER / "reviews.yaml"
        return TINY if self.base_model is None else _MAIL / "real_model.yaml"


REAL_DEFAULTS = DemoOptions(
    real=True, rounds=None, versions=10, minutes=12.0, tasks_per_round=8, concurrency=16, held_out_tasks=60,
    held_out_attempts=3,
)  # fmt: skip


def run(options: DemoOptions) -> int:
    """Run the demo; return 0 if held-out success rose significantly, else 1."""
    signals.install_handlers()
    demo = Demo(options)
    figures = demo.play()
    report.show(figures)
    report.write(figures, demo.folder)
    return 0 if figures["learned"] else 1


class Demo:
    """One run: its folder, its stages and the seconds that each took."""

    def __init__(self, options: DemoOptions, say: Callable[[str], None] = print) -> None:
        self._options = options
        self._say = say
        self._settings = _settings(options, say)
        self._seconds: dict[str, float] = {}
        self.folder = self._settings.state.root
        self._home = self.folder / "email_search"

    def play(self) -> dict[str, Any]:
        """Run every stage; return the figures. The services are always stopped."""
        if ignored := setting_variables(os.environ):
            self._say(f"ignored, because the demo has its own settings: {', '.join(ignored)}")
        lock = self._take_folder()
        try:
            if not self._options.real:
                with self._stage("prepare", "make the mailbox and the task set"):
                    os.environ["EMAIL_SEARCH_HOME"] = str(self._home)  # the judge reads the task set there
                    self._agent(["build-db"], "")
            self._with_services(lock)
            return self._figures()
        finally:
            lock.release()

    def _with_services(self, lock: ProjectLock) -> None:
        """Run the stages that need the services."""
        alias = self._settings.model
        services = contextlib.ExitStack()
        try:
            with self._stage("start", "start vLLM, the proxy and the trainer"):
                supervisor = services.enter_context(start_services(self._settings, lock, self._say))
                if address := supervisor.plan.console:
                    self._say(f"console: {address}")
            with self._stage("evaluate_before", "tasks that are never trained, under the base model"):
                self._evaluate(supervisor, "before", f"{alias}@0")
            with self._stage("train", "the agent works; the trainer trains and swaps in the background"):
                self._work(supervisor)
                live = self._settle(supervisor)
            with self._stage("evaluate_after", f"the same tasks under {alias}@{live}"):
                self._evaluate(supervisor, "after", f"{alias}@{live}")
        finally:
            with self._stage("stop", "stop everything"):
                services.close()

    def _take_folder(self) -> ProjectLock:
        """Rename the folder of the last run and return the lock of a new one. All checks run first."""
        settings, state = self._settings, self._settings.state
        vllm_command.check_installed(settings)
        vllm_command.check_model(settings.base_model)
        is_new = not self.folder.exists()
        state.make(min_free_disk_mb=settings.min_free_disk_mb)
        lock = ProjectLock(state)
        if is_new:
            return lock
        stop_leftover_processes(state)  # of a run that was killed; their pid files are about to move
        last = StateFolder(self.folder.with_name(self.folder.name + ".last"))
        shutil.rmtree(last.root, ignore_errors=True)
        self.folder.rename(last.root)  # the last run is kept, older ones are deleted
        last.pid("up").unlink(missing_ok=True)
        lock.release()
        state.make(min_free_disk_mb=settings.min_free_disk_mb)
        return ProjectLock(state)

    def _evaluate(self, supervisor: Supervisor, name: str, model: str) -> None:
        """Run the held-out tasks at temperature 1 and then greedily."""
        tasks = ["test", "--tasks", str(self._options.held_out_tasks)]
        attempts = ["--attempts", str(self._options.held_out_attempts)]
        for how, sampling in (("sampled", attempts), ("greedy", ["--temperature", "0"])):
            self._agent([*tasks, *sampling], model, supervisor, f"{name}_{how}")

    def _work(self, supervisor: Supervisor) -> None:
        options, alias = self._options, self._settings.model
        limits = {
            "--tasks-per-round": options.tasks_per_round,
            "--attempts": options.attempts,
            "--seed": options.seed,
            "--rounds": options.rounds,
            "--seconds": options.minutes and options.minutes * 60,
        }
        arguments = [text for name, value in limits.items() if value is not None for text in (name, str(value))]
        with open_store(self._settings.store_url) as store:
            self._agent(
                ["train", *arguments], alias, supervisor, "train",
                lambda: options.versions is not None and store.policies.live()[alias].version >= options.versions,
            )  # fmt: skip

    def _settle(self, supervisor: Supervisor) -> int:
        """Wait until the trainer has used the traffic; return the live version.

        Traffic that ends by time leaves more groups than rounds can train. They are not waited for: trained one round
        after the other without new traffic they grow ever older, up to `trainer.max_staleness` versions.
        """
        alias, trainer = self._settings.model, self._settings.trainer
        full = {"num_generations": trainer.num_generations, "groups_per_round": trainer.groups_per_round}
        until = time.monotonic() + (_SETTLE_SECONDS if self._options.minutes is None else 0.0)
        with open_store(self._settings.store_url) as store:
            while time.monotonic() < until and not is_drained(store, alias, **full):
                supervisor.check()
                time.sleep(0.2)
            return store.policies.live()[alias].version

    def _agent(
        self,
        arguments: list[str],
        model: str,
        supervisor: Supervisor | None = None,
        rows: str = "",
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Run the agent's command, which writes its results to ROWS.jsonl; fail if a service exits meanwhile.

        It starts no further attempt once `is_over` returns True.
        """
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RATCHET_")}
        environment |= {
            "OPENAI_API_KEY": first_api_key() or "demo",
            "OPENAI_MODEL": model,
            "EMAIL_SEARCH_HOME": str(self._home),
        }
        if supervisor is not None:
            environment["OPENAI_BASE_URL"] = supervisor.plan.base_url
            out = str(self.folder / f"{rows}.jsonl")
            arguments = [*arguments, "--concurrency", str(self._options.concurrency), "--out", out]
        agent = "ratchet.demo.reviews" if self._options.real else "ratchet.demo.email_search"
        command = [sys.executable, "-P", "-m", agent, *arguments]
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
            try:
                while process.poll() is None:
                    if supervisor is not None:
                        supervisor.check()
                    if is_over():
                        process.terminate()
                        process.wait()
                    time.sleep(0.1)
            except BaseException:
                process.terminate()
                raise
        if process.returncode:
            raise CliError(f"the agent ended with exit code {process.returncode}: {' '.join(command)}")

    def _figures(self) -> dict[str, Any]:
        settings = self._settings
        about = {
            "seed": self._options.seed,
            "base_model": str(settings.base_model),
            "dtype": vllm_command.number_format(settings, vllm_command.has_visible_gpu(settings)),
            "release_policy": settings.trainer.release.policy,
        }
        with open_store(settings.store_url) as store:
            return report.read_results(store, settings.model, self.folder, about, self._seconds)

    @contextlib.contextmanager
    def _stage(self, name: str, text: str) -> Iterator[None]:
        self._say(f"\n== {text}")
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = time.monotonic() - began


def _settings(options: DemoOptions, say: Callable[[str], None]) -> Settings:
    """Return the demo's settings. RATCHET_* variables of the user apply to other projects, not to the demo."""
    known = known_keys()
    for path in options.changes:
        type_of_key(path, known, f"--set {'.'.join(path)}")
    model = options.base_model or (pretrained_model.model_folder(say) if options.real else _MAIL / "policy")
    values = {
        ("project",): ("the demo", "demo-real" if options.real else "demo"),
        ("base_model",): ("--model", str(model)),
        ("learner", "seed"): ("--seed", options.seed),
        ("state_dir",): ("--state-dir", str(options.state_dir) if options.state_dir else None),
    } | {path: (f"--set {'.'.join(path)}", value) for path, value in options.changes.items()}
    secrets = {name: value for name, value in os.environ.items() if name in SECRETS}
    return load(options.settings_file, values, secrets)
