"""`ratchet.train`: train groups of trajectories with rewards; and services for a loop of `gather` and `train`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratchet.api.arguments import Arguments, read_arguments
from ratchet.api.event_loop import run_to_end
from ratchet.api.runs import start
from ratchet.errors import RunCancelled
from ratchet.output import print_note
from ratchet.settings.project_settings import Settings
from ratchet.supervisor.up import ProjectServices, attach_or_start
from ratchet.tuner.rollouts.trajectory_groups import TrajectoryGroup
from ratchet.tuner.weights.given_groups import read_given
from ratchet.tuning import train_groups
from ratchet.tuning.caller import RunCaller
from ratchet.tuning.context import open_store


@dataclass(frozen=True, slots=True)
class TrainedVersion:
    """The result of `ratchet.train`.

    name          the version, such as `policy@3`
    state         live; unproven: its proof is undecided, and the next step continues from it; rejected: its
                  proof failed; ramp: the settings say `release.policy: guarded`, and live traffic decides; candidate:
                  it waits for a person
    groups        number of groups that were trained
    trajectories  number of trajectories that were trained
    left_out      trajectories that were not trained, by reason
    metrics       of the round: loss, tokens_trained, reward and others
    """

    name: str
    state: str
    groups: int
    trajectories: int
    left_out: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)


def train(
    groups: Sequence[TrajectoryGroup],
    *,
    timeout: float | None = None,
    agent: str | None = None,
    base_model: str | None = None,
    project: str | None = None,
    config: str | Path | None = None,
) -> TrainedVersion:
    """Train on groups with rewards, and return when the new version is live. Also in a notebook.

    It uses the running project; if none runs, vLLM, proxy and trainer are started for the call and stopped at its end
    (for a loop, see `ratchet.services`). The trainer's judge is not called: the rewards are the scores. A round
    starts at once, with at most `trainer.groups_per_round` groups; further ones make further rounds.

    groups      what `gather` returned, or groups of imported trajectories: token ids with logprobs, and rewards
    timeout     seconds; None: no limit
    agent       the project's agent, if it has several
    base_model  start the project with this model if it does not run; one that runs with another is refused
    project     the project's name
    config      the project's settings file; None: ratchet.yaml of the current folder

    A call that ended early is repeated with the same groups, also after a restart of the kernel: those that the trainer
    has already are waited for. Trajectories without a reward, and groups whose rewards are equal, are left out. Raises
    TuningError if nothing is left, if a trajectory is malformed or was trained before, or if the trainer dropped all
    groups; TimeoutError, with the trainer going on; CliError if the services cannot be started.
    """
    return run_to_end(train_async(**locals()))


async def train_async(
    groups: Sequence[TrajectoryGroup],
    *,
    timeout: float | None = None,
    agent: str | None = None,
    base_model: str | None = None,
    project: str | None = None,
    config: str | Path | None = None,
) -> TrainedVersion:
    """Do what `train` does, beside the running event loop."""
    chosen = read_given(groups)
    given = _arguments(agent, base_model, project, config)
    settings = train_groups.with_trainer(given.settings)

    def work(caller: RunCaller) -> None:
        with _services(settings, caller) as running:
            train_groups.train(settings, chosen, timeout, caller, running.check)

    try:
        run = await (await start(given, train_groups.KIND, None, work))
    except RunCancelled as cancelled:
        raise RunCancelled(
            "the call was cancelled; a running project goes on: call it again with the same groups"
        ) from cancelled
    with open_store(settings.store_url, create=False) as store:
        result = dict(store.tunings.get(run.id).result or {})
    return TrainedVersion(name=f"{settings.model}@{result.pop('version')}", **result)


@contextmanager
def services(
    *,
    agent: str | None = None,
    base_model: str | None = None,
    project: str | None = None,
    config: str | Path | None = None,
) -> Iterator[str]:
    """Use the running project for a `with` block, or start vLLM, proxy and trainer for it; yield the base URL.

    Use it around a loop of `gather` and `train`, to start them once. The arguments are those of `train`. Raises
    CliError if they cannot be started.
    """
    settings = train_groups.with_trainer(_arguments(agent, base_model, project, config).settings)
    with _services(settings, RunCaller()) as running:
        yield running.base_url


@contextmanager
def _services(settings: Settings, caller: RunCaller) -> Iterator[ProjectServices]:
    """Yield the services of the project; if its proxy is elsewhere, so is its trainer."""
    if url := settings.tuner_settings().proxy_url:
        yield ProjectServices(f"{url.removesuffix('/v1')}/v1", caller.check)
        return
    with attach_or_start(settings, print_note, caller.check) as running:
        yield running


def _arguments(agent: str | None, base_model: str | None, project: str | None, config: str | Path | None) -> Arguments:
    unused = dict.fromkeys(("workflow", "judge", "tasks", "attempts", "concurrency", "seed", "test_size"))
    return read_arguments(
        unused | {"agent": agent, "base_model": base_model, "project": project, "config": config}
    )  # fmt: skip
