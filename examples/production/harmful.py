"""A version that is worse on purpose: an altered copy of the live version, handed in as a candidate.

It shows what the release policy does with such a version. Everything goes through the `ratchet` command, as a person
would do it: what is not decided yet is rejected, the live version's adapter is read from its folder, and
`ratchet policies import` makes the altered copy a candidate, which is proven, checked and released like any other.

    opposite    the adapter with its sign changed: what was learned is unlearned. Its answers look as good as ever, so
                only the users' thumbs show the loss
    random      so much noise that it writes no valid tool call: the comparison on recent prompts shows it
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from examples.production.stream import Served

CONFIG = Path(__file__).with_name("ratchet.yaml")
OPPOSITE, RANDOM = "opposite", "random"
_NOISE = 0.3  # standard deviation of what is added to each weight of the LoRA matrices B
_WEIGHTS = "adapter_model.safetensors"
_REASON = "a version that is worse on purpose takes its place"
_ATTEMPTS = 60  # a second apart: a round that is being trained ends before
_UNDECIDED = ("candidate", "ramp")


class NotReady(RuntimeError):
    """There is no version to copy, or the project does not take another one; the message has the remedy."""


def altered_copy(source: Path, target: Path, *, scale: float = 1.0, noise: float = 0.0, seed: int = 0) -> Path:
    """Write a copy of a PEFT adapter whose matrices B are multiplied by `scale`, with normal noise; return its folder.

    `noise` is the standard deviation of what is added to each weight.
    """
    rng = np.random.default_rng(seed)
    target.mkdir(parents=True)
    shutil.copyfile(source / "adapter_config.json", target / "adapter_config.json")
    weights = load_file(source / _WEIGHTS)
    for name, matrix in sorted(weights.items()):
        if ".lora_B." in name:
            weights[name] = (scale * matrix + noise * rng.standard_normal(matrix.shape)).astype(matrix.dtype)
    save_file(weights, target / _WEIGHTS)
    return target


def hand_in(agent: str, kind: str, config: Path = CONFIG) -> int:
    """Make an altered copy of the live version a candidate; return its number. Raises NotReady."""
    for attempt in range(_ATTEMPTS):
        time.sleep(float(attempt > 0))
        versions = _versions(agent, config)
        live = next((one for one in versions if one["state"] == "live"), None)
        if live is None or not live["adapter"]:
            raise NotReady(f"no trained version of {agent} is live yet: let the stream go on until one is")
        if any(one["state"] in _UNDECIDED for one in versions):
            _ratchet(config, "policies", "rollback", f"{agent}@{live['version']}", "--reason", _REASON)
        with tempfile.TemporaryDirectory() as folder:
            copy = _altered(Path(live["adapter"]), Path(folder) / kind, kind)
            done = _ratchet(config, "policies", "import", str(copy), agent, fine=(0, 1))
        if done.returncode == 0:
            return max(int(one["version"]) for one in _versions(agent, config))
    raise NotReady(f"{agent} took no candidate: {done.stdout.strip()}")


def _altered(source: Path, target: Path, kind: str) -> Path:
    if kind == OPPOSITE:
        return altered_copy(source, target, scale=-1.0)
    return altered_copy(source, target, noise=_NOISE)


def outcome(agent: str, version: int, served: Sequence[Served], config: Path = CONFIG) -> dict[str, Any]:
    """Return what became of a version: its state, the last decision, and the users that it answered."""
    found = next(one for one in _versions(agent, config) if one["version"] == version)
    decision = found["decision"] or {}
    met = [one.rollout.success for one in served if f"{agent}@{version}" in one.rollout.models]
    return {
        "version": version,
        "state": found["state"],
        "decided_by": decision.get("decided_by"),
        "reason": decision.get("reason"),
        "users": len(met),
        "content": round(sum(met) / len(met), 4) if met else None,
    }


def _versions(agent: str, config: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(_ratchet(config, "policies", "list", "--model", agent, "--json").stdout)
    return found


def _ratchet(config: Path, *words: str, fine: Sequence[int] = (0,)) -> subprocess.CompletedProcess[str]:
    """Run a command of the project. Raises NotReady if it fails."""
    command = [sys.executable, "-m", "ratchet", "--config", str(config), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode not in fine:
        raise NotReady(f"`ratchet {' '.join(words)}` failed: {done.stdout.strip()}")
    return done
