"""The same rounds on several architectures, in one, two and four processes, with a copy of the model and sharded.

A program: the libraries are imported once, and every group of processes is forked from it. A group does all of its
cases one after the other, and rank zero writes a checkpoint and the figures of each into a folder of its name.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ratchet.trainer.learner.host import LearnerHost
from ratchet.trainer.learner.launch import rank
from ratchet.trainer.settings.learner_settings import LearnerProcessSettings, LearnerSettings
from tests.harness.ports import free_port
from tests.harness.trainer.model_shapes import SHAPES
from tests.harness.trainer.several_processes import forked
from tests.harness.trainer.tiny import build_rows

AGENT = LearnerSettings(loss_type="grpo", beta=0.01, learning_rate=1e-3, steps_per_round=2, lora_r=2)
OTHER = replace(AGENT, loss_type="cispo", beta=0.0, seed=3)


@dataclass(frozen=True, slots=True)
class ProcessLayout:
    """Processes that train as one."""

    sharding: str
    processes: int

    @property
    def cases(self) -> list[str]:
        """Architectures and precisions; groups of four do one dense model and one mixture of experts."""
        if self.processes == 4:
            return ["llama-fp32", "qwen3_moe-fp32"]
        return [*(f"{shape}-fp32" for shape in SHAPES), "qwen3-bf16"]

    @property
    def name(self) -> str:
        return f"{self.sharding}{self.processes}"


# The first one is what the others are compared with.
LAYOUTS = [
    ProcessLayout("none", 1),
    ProcessLayout("none", 2),
    ProcessLayout("none", 4),
    ProcessLayout("fsdp2", 2),
    ProcessLayout("fsdp2", 4),
]
MOST_SECONDS = 400
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}


def run_group(group: ProcessLayout, models: Path, folder: Path) -> int:
    """Do every case; return the exit code."""
    for case in group.cases:
        shape, _, precision = case.rpartition("-")
        run_case(group, models / shape, folder / group.name / case, folder, PRECISIONS[precision])
    return 0


def run_case(group: ProcessLayout, model: Path, folder: Path, groups: Path, dtype: str) -> None:
    """Train an agent beside another one, with what it scores before and after the other's rounds."""
    process = LearnerProcessSettings(
        threads=1, token_budget=120, sharding=group.sharding, num_processes=group.processes, lora_r=2,
        gradient_checkpointing=model.name == "llama", dtype=dtype,
    )  # fmt: skip
    host = LearnerHost(str(model), process)
    rows = build_rows(5, seed=9)
    agent, other = (replace(one, dtype=dtype) for one in (AGENT, OTHER))
    host.open("agent", agent, None)
    reports = [host.train_round("agent", build_rows(count, seed=count)) for count in (7, 3)]
    before = host.score("agent", rows)
    host.open("other", other, None)
    host.train_round("other", build_rows(6, seed=1))
    after = host.score("agent", rows)
    host.save("agent", folder / "0001")
    host.open("agent", agent, folder / "0001" if rank() == 0 else folder / "followers have no file")
    found: dict[str, Any] = {
        "reports": [[report.loss, report.grad_norm, report.weight_change, report.entropy] for report in reports],
        "logprobs": [list(row) for row in before],
        "isolated": before == after,
        "resumed": host.score("agent", rows) == before,
        "saved_by_path": host.score("agent", rows, adapter=folder / "0001") == before,
        "kinds": sorted({type(parameter).__name__ for parameter in host.trainer.model.parameters()}),
        "parts": sum(getattr(p, "_local_tensor", p).numel() for p in host.trainer.model.parameters()),
        "lora_dtypes": sorted({str(p.dtype) for p in host.trainer.lora_parameters().values()}),
        "base_dtype": str(host.trainer.model.get_input_embeddings().weight.dtype),
    }
    theirs = groups / "from_none1" / folder.name
    if theirs.is_dir():  # a checkpoint of a process that holds the whole model
        host.open("agent", agent, theirs)
        found["read_from_whole"] = [list(row) for row in host.score("agent", rows)]
        host.save("agent", folder / "0002")
    if rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


def start(group: ProcessLayout, models: Path, folder: Path) -> list[int]:
    """Fork the processes of a group; return their ids."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(group.processes)}
    (folder / group.name).mkdir()
    children = []
    for place in range(group.processes):
        own = {"RANK": str(place), "LOCAL_RANK": str(place), "OMP_NUM_THREADS": "1"}
        log = folder / f"{group.name}-{place}.log"
        children.append(forked(partial(run_group, group, models, folder), log, meeting | own, MOST_SECONDS))
    return children


def main(models: Path, folder: Path) -> None:
    first, *others = LAYOUTS
    for child in start(first, models, folder):
        os.waitpid(child, 0)
    for case in first.cases:
        shutil.copytree(folder / first.name / case / "0001", folder / "from_none1" / case)
    for child in [child for group in others for child in start(group, models, folder)]:
        os.waitpid(child, 0)


if __name__ == "__main__":
    from ratchet.trainer.learner import lora  # noqa: F401 - with all that it imports, before the forks

    main(Path(sys.argv[1]), Path(sys.argv[2]))
