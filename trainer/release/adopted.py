"""Versions that no round made: a copy of another agent's version, or an adapter that was trained elsewhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.store.errors import InvalidTransition, RecordNotFound
from ratchet.store.records import Policy
from ratchet.store.states import PolicyState
from ratchet.store.store import Store
from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.adapters.adapter_store import AdapterStore, is_remote, number_of
from ratchet.trainer.errors import CheckpointDamaged, CheckpointError, SettingError
from ratchet.trainer.settings.learner_settings import LORA_VARIANTS, LearnerSettings

# Fork: copy a version of one agent, adapter and learner's state, into another agent as its candidate.
#
# The copy lies among the target's own versions, because vLLM finds `agent@version` there, and the source may be pruned.
# It is proven and released like any candidate, and training of the target goes on from it. Imports no torch.

_UNDECIDED = (PolicyState.CANDIDATE, PolicyState.RAMP)
_LEARNER_STATE = f"{checkpoint.STATE}/state.json"


@dataclass(frozen=True, slots=True)
class ForkTarget:
    """The agent that gets the version: its settings, and the folder or URL of its versions."""

    alias: str
    versions: str
    learner: LearnerSettings


@dataclass(frozen=True, slots=True)
class Fork:
    """The candidate, and whether the learner's state came with it; without, the optimizer starts over."""

    candidate: Policy
    with_state: bool


def fork(store: Store, adapters: AdapterStore, source: Policy, target: ForkTarget, *, by: str) -> Fork:
    """Copy a version that has an adapter, and record it as the target's candidate.

    Raises SettingError, InvalidTransition or RecordNotFound if the fork is not possible, CheckpointError if the copy is
    not: the target has no new version then.
    """
    name = f"{source.alias}@{source.version}"
    _check(store, source, target, name)
    folder = adapters.fetch(source.adapter or "")
    with_state = (folder / _LEARNER_STATE).is_file()
    _check_adapter(folder, target, name)

    def copy(aside: Path) -> None:
        shutil.copytree(folder, aside, dirs_exist_ok=True, ignore=shutil.ignore_patterns(checkpoint.MANIFEST))
        if not with_state:
            (aside / checkpoint.STATE).mkdir(exist_ok=True)
            (aside / checkpoint.ADAPTER_ONLY).write_text(f"{name}\n")

    origin = {"forked_from": {"alias": source.alias, "version": source.version}, "by": by}
    candidate = _adopt(store, adapters, target, copy, origin, f"forked from {name} by {by}")
    return Fork(candidate, with_state)


def _check(store: Store, source: Policy, target: ForkTarget, name: str) -> None:
    if source.alias == target.alias:
        raise SettingError(
            f"{name} is a version of {target.alias} already: to go back to it, run `ratchet policies rollback {name}`"
        )
    if source.adapter is None:
        raise SettingError(f"{name} has no adapter: it is the base model, which is version 0 of every agent")
    if source.pruned_at is not None:
        raise SettingError(f"{name} was pruned, its folder is deleted: choose a version that `policies list` shows")
    check_target(store, target.alias)


def check_target(store: Store, alias: str) -> None:
    """Raise RecordNotFound or InvalidTransition if the agent cannot get another candidate now."""
    known = store.policies.all(alias)
    if not known:
        raise RecordNotFound(
            f"{alias} is no agent of this store: add it under `agents`, and run `ratchet up` or `ratchet reload`"
        )
    for policy in known:  # asked again with the commit; here, so that nothing is copied in vain
        if policy.state in _UNDECIDED:
            raise InvalidTransition(
                f"{alias}@{policy.version} is a {policy.state} that is not decided: wait for it, or decide with "
                "`ratchet policies promote` or `ratchet policies rollback`"
            )


def _check_adapter(folder: Path, target: ForkTarget, name: str) -> None:
    """Raise CheckpointError if the target's learner could not go on from the adapter."""
    saved = _saved_settings(folder)
    now = {
        "lora_r": target.learner.lora_r,
        "lora_alpha": target.learner.lora_alpha,
        "target_modules": json.loads(json.dumps(target.learner.target_modules, default=list)),
    }
    for field, value in now.items():
        if field in saved and saved[field] != value:
            raise CheckpointError(
                f"{name} was trained with {field} {saved[field]!r}, and learner.{field} of {target.alias} is "
                f"{value!r}: set it to {saved[field]!r}"
            )


def _saved_settings(folder: Path) -> dict[str, Any]:
    """Return the settings that shape the adapter, as far as the folder says."""
    try:
        if (folder / _LEARNER_STATE).is_file():
            settings: dict[str, Any] = json.loads((folder / _LEARNER_STATE).read_text())["settings"]
            return settings
        config = json.loads((folder / "adapter_config.json").read_text())
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointDamaged(f"{folder} is no readable checkpoint: {error}; fork another version") from error
    return {"lora_r": config.get("r"), "lora_alpha": config.get("lora_alpha")}


# Import: an adapter that was trained elsewhere, as a candidate of an agent.
#
# It is proven, checked and released like any candidate, and training goes on from it with a new optimizer. The copy
# lies among the agent's own versions. Refused is what the learner could not go on from: another kind of adapter, rank
# or lora_alpha, and, if the agent has a version already, other matrices. Imports no torch.

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_Shapes = dict[str, tuple[int, ...]]


def import_adapter(store: Store, adapters: AdapterStore, folder: Path, target: ForkTarget, *, by: str) -> Policy:
    """Copy the adapter in `folder`, as PEFT saved it, and record it as the target's candidate; return that.

    Raises InvalidTransition, RecordNotFound or CheckpointError if that is not possible: the target has no new version
    then.
    """
    folder = folder.absolute()
    check_target(store, target.alias)
    _check_config(_config(folder), folder, target)
    _check_shapes(store, target.alias, folder)

    def copy(aside: Path) -> None:
        for name in (CONFIG, WEIGHTS):
            shutil.copyfile(folder / name, aside / name)
        (aside / checkpoint.STATE).mkdir()
        (aside / checkpoint.ADAPTER_ONLY).write_text(f"{folder}\n")

    origin = {"imported_from": str(folder), "by": by}
    return _adopt(store, adapters, target, copy, origin, f"imported from {folder} by {by}")


def _adopt(
    store: Store,
    adapters: AdapterStore,
    target: ForkTarget,
    copy: Callable[[Path], None],
    origin: Mapping[str, Any],
    reason: str,
) -> Policy:
    """Write the files that `copy` puts into a folder as the target's next version, and record it as its candidate."""
    reference = adapters.next_reference(target.versions, store.rounds.next_version(target.alias))
    adapters.write(reference, lambda made: checkpoint.write_atomically(made, copy))
    version = number_of(reference)
    return store.rounds.adopt(target.alias, version=version, checkpoint=reference, origin=origin, reason=reason)


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointDamaged(
            f"{folder} is not the folder of a PEFT adapter, its {CONFIG} cannot be read: {error}"
        ) from error
    if not isinstance(config, dict):
        raise CheckpointDamaged(f"{folder / CONFIG} is not a JSON object")
    return config


def _check_config(config: Mapping[str, Any], folder: Path, target: ForkTarget) -> None:
    """Raise CheckpointError if the target's learner could not go on from the adapter."""
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise CheckpointError(f"{folder} is an adapter of type {kind}, and only LORA can be trained")
    if used := [name for name in LORA_VARIANTS if config.get(name)]:
        raise CheckpointError(f"{folder} uses {', '.join(used)}, which the learner does not train: give plain LoRA")
    for field, setting in (("r", "lora_r"), ("lora_alpha", "lora_alpha")):
        own, given = getattr(target.learner, setting), config.get(field)
        if given != own:
            raise CheckpointError(
                f"{folder} has {field} {given}, and learner.{setting} of {target.alias} is {own}: they must be equal"
            )


def _check_shapes(store: Store, alias: str, folder: Path) -> None:
    """Raise CheckpointError if the adapter has other matrices than the agent's newest version at hand."""
    given = _shapes(folder)
    for policy in reversed(store.policies.all(alias)):
        if policy.adapter is None or policy.pruned_at is not None or is_remote(policy.adapter):
            continue
        try:
            known = _shapes(Path(policy.adapter))
        except CheckpointDamaged:
            continue
        if different := sorted(name for name in given.keys() | known.keys() if given.get(name) != known.get(name)):
            raise CheckpointError(
                f"{folder} does not have the matrices of {alias}@{policy.version}: {different[0]} is "
                f"{given.get(different[0], 'missing')} there and {known.get(different[0], 'missing')} here"
            )
        return


def _shapes(folder: Path) -> _Shapes:
    import safetensors  # late: a controller whose learner runs elsewhere has the base package alone

    try:
        with safetensors.safe_open(folder / WEIGHTS, framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  no mapping
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointDamaged(f"{folder} has no readable {WEIGHTS}: {error}") from error
