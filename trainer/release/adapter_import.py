"""Import: an adapter that was trained elsewhere, as a candidate of an agent.

It is proven, checked and released like any candidate, and training goes on from it with a new optimizer. The copy lies
among the agent's own versions. Refused is what the learner could not go on from: another kind of adapter, rank or
lora_alpha, and, if the agent has a version already, other matrices. Imports no torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors

from ratchet.store.records import Policy
from ratchet.store.store import Store
from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.adapters.adapter_store import AdapterStore, is_remote, number_of
from ratchet.trainer.errors import CheckpointDamaged, CheckpointMismatch
from ratchet.trainer.release.fork import ForkTarget, check_target
from ratchet.trainer.settings.adapter_and_memory import LORA_VARIANTS

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
    reference = adapters.next_reference(target.versions, store.rounds.next_version(target.alias))

    def copy(aside: Path) -> None:
        for name in (CONFIG, WEIGHTS):
            shutil.copyfile(folder / name, aside / name)
        (aside / checkpoint.STATE).mkdir()
        (aside / checkpoint.ADAPTER_ONLY).write_text(f"{folder}\n")

    adapters.write(reference, lambda made: checkpoint.write_atomically(made, copy))
    return store.rounds.adopt(
        target.alias,
        version=number_of(reference),
        checkpoint=reference,
        origin={"imported_from": str(folder), "by": by},
        reason=f"imported from {folder} by {by}",
    )


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
    """Raise CheckpointMismatch if the target's learner could not go on from the adapter."""
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise CheckpointMismatch(f"{folder} is an adapter of type {kind}, and only LORA can be trained")
    if used := [name for name in LORA_VARIANTS if config.get(name)]:
        raise CheckpointMismatch(f"{folder} uses {', '.join(used)}, which the learner does not train: give plain LoRA")
    for field, setting in (("r", "lora_r"), ("lora_alpha", "lora_alpha")):
        own, given = getattr(target.learner, setting), config.get(field)
        if given != own:
            raise CheckpointMismatch(
                f"{folder} has {field} {given}, and learner.{setting} of {target.alias} is {own}: they must be equal"
            )


def _check_shapes(store: Store, alias: str, folder: Path) -> None:
    """Raise CheckpointMismatch if the adapter has other matrices than the agent's newest version at hand."""
    given = _shapes(folder)
    for policy in reversed(store.policies.all(alias)):
        if policy.adapter is None or policy.pruned_at is not None or is_remote(policy.adapter):
            continue
        try:
            known = _shapes(Path(policy.adapter))
        except CheckpointDamaged:
            continue
        if different := sorted(name for name in given.keys() | known.keys() if given.get(name) != known.get(name)):
            raise CheckpointMismatch(
                f"{folder} does not have the matrices of {alias}@{policy.version}: {different[0]} is "
                f"{given.get(different[0], 'missing')} there and {known.get(different[0], 'missing')} here"
            )
        return


def _shapes(folder: Path) -> _Shapes:
    try:
        with safetensors.safe_open(folder / WEIGHTS, framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  no mapping
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointDamaged(f"{folder} has no readable {WEIGHTS}: {error}") from error
