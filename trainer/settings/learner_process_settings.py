"""The learner's settings that all of its agents share: the shape of the adapters, memory, and processes.

An instance is always valid; the error of an invalid one names the field and the remedy. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from ratchet.trainer.settings.adapter_and_memory import AdapterAndMemorySettings
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.value_types import Devices, PlainUrl

MAX_PORT = 65535
MAX_BODY_MB = 4095  # a frame's length has 32 bits

# How several processes hold the base model.
SHARDINGS = ("none", "fsdp2")


@dataclass(frozen=True, slots=True)
class LearnerProcessSettings(AdapterAndMemorySettings):
    """What the learner of one base model is started with. Raises SettingError for values out of range.

    devices                   GPUs of the learner: 0, or 0,1, or UUIDs; null: those in CUDA_VISIBLE_DEVICES, of which
                              `ratchet up` leaves the first to vLLM, if there are enough for both
    num_processes             training processes of each machine, started by torchrun
    gpu_memory_utilization    share of each of its GPUs that the learner may take; null: all that is free, but beside
                              vLLM on one GPU `ratchet up` sets what `vllm.gpu_memory_utilization` leaves
    sharding                  how the processes hold the base model: none, each has a copy; or fsdp2, each has a part of
                              every layer (torch's fully_shard), for models that do not fit one GPU; not with nf4
    machines                  machines of the learner; each runs `ratchet learner` with its num_processes
    machine_rank              number of this machine, from 0; null: SLURM_PROCID, JOB_COMPLETION_INDEX or RANK
    leader                    address of machine 0, which the others connect to; null: MASTER_ADDR
    leader_port               port of machine 0 for the others
    url                       address of a learner that is started elsewhere, such as http://gpu1:8002; null: `ratchet
                              up` and `ratchet trainer` start one
    host                      address that the learner listens on; any but loopback requires RATCHET_LEARNER_TOKEN
    port                      port that the learner listens on; 0: any free one, which `ratchet up` and `ratchet
                              trainer` take too unless a port is set
    max_body_mb               largest request of a controller, a round's rows, in MiB
    """

    devices: Devices = None
    num_processes: int = 1
    machines: int = 1
    machine_rank: int | None = None
    leader: str | None = None
    leader_port: int = 29500
    url: PlainUrl | None = None
    host: str = "127.0.0.1"
    port: int = 8002
    max_body_mb: int = 1024
    gpu_memory_utilization: float | None = None
    sharding: str = "none"

    def __post_init__(self) -> None:
        self.check_shared()
        self._require("num_processes", self.num_processes >= 1, "at least 1")
        self._require("machines", self.machines >= 1, "at least 1")
        rank = self.machine_rank
        self._require("machine_rank", rank is None or 0 <= rank < self.machines, "null, or from 0 to machines - 1")
        self._require("leader_port", 0 < self.leader_port <= MAX_PORT, "a port, such as 29500")
        self._require("port", 0 <= self.port <= MAX_PORT, "a port, such as 8002, or 0")
        self._require("max_body_mb", 1 <= self.max_body_mb <= MAX_BODY_MB, f"from 1 to {MAX_BODY_MB}")
        share = self.gpu_memory_utilization
        self._require("gpu_memory_utilization", share is None or 0 < share <= 1, "null, or above 0 and at most 1")
        self._require("sharding", self.sharding in SHARDINGS, f"one of {', '.join(SHARDINGS)}")
        self._require(
            "sharding",
            self.sharding == "none" or self.quantization == "none",
            "none with learner.quantization nf4, whose packed weights cannot be sharded: with fsdp2 the base model "
            "stays in bf16, so set learner.quantization to none",
        )


# What an agent and its learner both have: those of the learner apply.
_SHARED = tuple(field.name for field in fields(AdapterAndMemorySettings))


def process_settings_of(
    settings: LearnerSettings, process: LearnerProcessSettings | None = None
) -> LearnerProcessSettings:
    """Return the settings of a learner whose only agent has these."""
    shared = {name: getattr(settings, name) for name in _SHARED}
    return replace(process or LearnerProcessSettings(), **shared)


def with_shared(settings: LearnerSettings, process: LearnerProcessSettings) -> LearnerSettings:
    """Return an agent's settings with what all agents of its learner share; its token_budget may be smaller."""
    shared = {name: getattr(process, name) for name in _SHARED if name != "token_budget"}
    return replace(settings, **shared, token_budget=min(settings.token_budget, process.token_budget))
