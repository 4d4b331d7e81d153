"""The doctor's check of GPU memory: base model, vLLM and learner fit, before any of them is loaded."""

from __future__ import annotations

from ratchet.checks.check_result import CheckResult
from ratchet.errors import CliError
from ratchet.settings.project_settings import Settings
from ratchet.supervisor import memory_checks, vllm_command


def check_memory(settings: Settings) -> CheckResult | None:
    """Return whether vLLM and learner fit their GPUs; None without a GPU."""
    if not vllm_command.has_visible_gpu(settings):
        return None
    try:
        planned = memory_checks.plan_memory(settings)
    except CliError as error:
        return CheckResult("memory", False, "the base model does not fit", str(error))
    return CheckResult("memory", True, "; ".join(planned.notes) or "vLLM and the learner fit their GPUs")


def why_no_learner(settings: Settings) -> str | None:
    """Return why the doctor's own learner would not fit beside what runs now; None if it does, or on a CPU."""
    if not vllm_command.has_visible_gpu(settings):
        return None
    needed, free = memory_checks.smallest_learner(settings), memory_checks.free_learner_memory(settings)
    if needed is None or free is None or needed <= free:
        return None
    gib = 2**30
    return f"not checked: the learner's GPU has {free / gib:.1f} GiB free, and a learner needs {needed / gib:.1f} GiB"
