"""The processes of a learner: torchrun on each machine starts them, and each finds its place. Imports no torch.

`ratchet learner` with more than one process or machine replaces itself by torchrun, which starts `ratchet learner`
again as each process. A scheduler only has to run one `ratchet learner` per machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta

from ratchet.trainer.errors import SettingError
from ratchet.trainer.settings.learner_settings import LearnerProcessSettings

# Where schedulers say which of its machines this is: SLURM, a Kubernetes Job or JobSet, Kubeflow's PyTorchJob.
_RANK_VARIABLES = ("SLURM_PROCID", "JOB_COMPLETION_INDEX", "RANK")
# From torchrun's SIGTERM to its SIGKILL, once one process has ended: the others cannot go on, and commit nothing.
_STOP_SECONDS = "7"
_PROCESS_VARIABLE = "TORCHELASTIC_RUN_ID"  # set by torchrun and accelerate launch in the processes that they start
IDLE_TIMEOUT = timedelta(days=30)  # there may be hours without traffic between two rounds


def processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return this process's rank on its machine, which is the number of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_worker(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun, or accelerate launch, has started this process."""
    return _PROCESS_VARIABLE in environ and "RANK" in environ


def torchrun_command(
    process: LearnerProcessSettings, environ: Mapping[str, str], program: Sequence[str]
) -> tuple[str, ...] | None:
    """Return torchrun with the program as every process; None if this process needs no launcher.

    Raises SettingError if the place of this machine is not known.
    """
    if is_worker(environ) or process.machines * process.num_processes == 1:
        return None
    where = (
        ("--standalone", "--local-addr", "127.0.0.1")
        if process.machines == 1
        else (
            *("--nnodes", str(process.machines), "--node-rank", str(machine_rank(process, environ))),
            *("--master-addr", _leader(process, environ), "--master-port", str(_leader_port(process, environ))),
        )
    )
    command = (sys.executable, "-P", "-m", "torch.distributed.run", *where, "--shutdown-timeout", _STOP_SECONDS)
    return (*command, "--nproc-per-node", str(process.num_processes), "--no-python", *program)


def machine_rank(process: LearnerProcessSettings, environ: Mapping[str, str]) -> int:
    """Return the number of this machine. Raises SettingError."""
    if process.machine_rank is not None:
        return process.machine_rank
    found = next((name for name in _RANK_VARIABLES if environ.get(name, "").isdigit()), None)
    if found is None:
        raise SettingError(
            f"learner.machines is {process.machines}, and the number of this machine is unknown: set "
            f"learner.machine_rank (RATCHET_LEARNER__MACHINE_RANK), or one of {', '.join(_RANK_VARIABLES)}"
        )
    number = int(environ[found])
    if number >= process.machines:
        raise SettingError(
            f"{found} is {number}, but learner.machines is {process.machines}: set it to the number of machines, and "
            "run one `ratchet learner` on each"
        )
    return number


def _leader(process: LearnerProcessSettings, environ: Mapping[str, str]) -> str:
    leader = process.leader or environ.get("MASTER_ADDR")
    if not leader:
        raise SettingError(
            f"learner.machines is {process.machines}, and the address of machine 0 is unknown: set learner.leader "
            "(RATCHET_LEARNER__LEADER) or MASTER_ADDR"
        )
    return leader


def _leader_port(process: LearnerProcessSettings, environ: Mapping[str, str]) -> int:
    given = environ.get("MASTER_PORT", "")
    return int(given) if given.isdigit() else process.leader_port
