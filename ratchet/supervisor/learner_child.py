"""The learner of `ratchet trainer`: found at `learner.url`, or started under the process guard on a free port."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from ratchet.settings.project_settings import Settings, local_url
from ratchet.store.store import open_store
from ratchet.supervisor import ports, process_guard
from ratchet.supervisor.services import learner_command, learner_environment, write_resolved_settings
from ratchet.trainer.learner_client import LearnerAccess, LearnerCommand
from ratchet.trainer.settings.trainer_settings import TrainerSettings

_STOP_SECONDS = 10.0  # from SIGTERM to SIGKILL


def run_with_learner(settings: Settings, first: TrainerSettings, run: Callable[[LearnerAccess], int]) -> int:
    """Run a trainer with its learner, which ends with it if it is a child; return the exit code.

    `first` are the settings of one of its agents. The code is 1 if the learner cannot be used.
    """
    store = open_store(first.store)
    try:
        with LearnerAccess(first, store, plan_learner_child(settings)) as learner:
            code = run(learner)
        return 1 if learner.failure is not None else code
    finally:
        store.close()


def plan_learner_child(settings: Settings) -> LearnerCommand | None:
    """Return how the trainer starts its learner; None if `learner.url` names one.

    Raises CliError if the port that the user set is in use.
    """
    process = settings.learner
    if process.url is not None:
        return None
    settings.state.make(min_free_disk_mb=settings.min_free_disk_mb)
    fixed = settings.is_set("learner", "port")
    wanted = process.port if fixed else 0  # nobody needs to know it
    port = ports.choose_port("learner", "learner.port", process.host, wanted, fixed=fixed, taken=set())
    config = settings.state.resolved.with_name("learner.json")
    changed = settings.changed(learner={"port": port})
    write_resolved_settings(changed, config)
    guard = (sys.executable, "-I", "-S", str(Path(process_guard.__file__)), str(_STOP_SECONDS))
    return LearnerCommand(
        arguments=(*guard, *learner_command(config)),
        environment=learner_environment(settings),
        url=local_url(process.host, port),
        log=settings.state.log("learner"),
        max_restarts=settings.max_restarts,
    )
