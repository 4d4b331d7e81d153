"""How many adapters vLLM must hold: in memory (`--max-cpu-loras`), and in one batch (`--max-loras`).

Per agent, vLLM may hold the version held back, the live one, the one in its ramp, the candidate that is proven next and
its amplified copy, one that open trajectories still use, and `trainer.keep_loaded_adapters` older ones. The first three
answer at the same time.
"""

from __future__ import annotations

from ratchet.errors import SettingsError
from ratchet.settings.project_settings import Settings

_BESIDES_OLD = 6  # held back, live, in its ramp, candidate, its amplified copy, draining
_AT_ONCE = 3  # held back, live, in its ramp
_LEAST_SLOTS, _MOST_SLOTS = 4, 16  # unless the settings say otherwise: each slot takes memory of the GPU


def max_loras(settings: Settings) -> int:
    """Return vLLM's --max-loras."""
    at_once = _AT_ONCE * len(settings.agents_by_name)
    return settings.vllm.max_loras or min(max(at_once, _LEAST_SLOTS), _MOST_SLOTS)


def held_adapters(settings: Settings) -> int:
    """Return how many adapters vLLM may have to hold, over all agents."""
    kept = [agent.keep_loaded_adapters for agent in settings.agents_by_name.values()]
    return sum(_BESIDES_OLD + count for count in kept)


def max_cpu_loras(settings: Settings) -> int:
    """Return vLLM's --max-cpu-loras. Raises SettingsError if the setting is too small."""
    own, needed, slots = settings.vllm, held_adapters(settings), max_loras(settings)
    if own.max_cpu_loras is None:
        return max(2 * slots, needed)
    least = max(slots, needed)
    if own.max_cpu_loras < least:
        agents = len(settings.agents_by_name)
        raise SettingsError(
            f"vllm.max_cpu_loras {own.max_cpu_loras} is too small: {agents} agent{'s'[: agents > 1]} may need {needed} "
            "adapters (held back, live, ramp, candidate and copy, draining and keep_loaded_adapters of each) in "
            f"memory, and vllm.max_loras is {slots}: set {least} or more, or leave it out"
        )
    return own.max_cpu_loras


def describe_thrashing(settings: Settings) -> str | None:
    """Return a warning if one batch cannot hold what serves at the same time; None if it can."""
    agents, slots = len(settings.agents_by_name), max_loras(settings)
    if slots >= _AT_ONCE * agents:
        return None
    return (
        f"vllm.max_loras is {slots}, and {agents} agents serve up to {_AT_ONCE * agents} versions at the same time "
        f"(held back, live and ramp of each): vLLM exchanges adapters and calls wait; set vllm.max_loras to "
        f"{_AT_ONCE * agents}"
    )
