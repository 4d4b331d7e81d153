"""How soon the sentinel sees a sick tool in recorded traffic, and how often it cries over healthy traffic.

    python -m benchmarks.sentinel STORE

Replays the tool calls of a store in the order of time: once as they are (every alarm is a false one, where the tools
were healthy), then with the results of the busiest tool turned into time-outs at some rate from some moment on, and
counts that tool's calls until the alarm.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections import Counter
from collections.abc import Sequence

import msgspec

from ratchet.store.records import ToolCall
from ratchet.store.states import ToolResult
from ratchet.store.store import open_store
from ratchet.trainer.sentinel.checks import TOOL_WINDOW, check_tool_health
from ratchet.trainer.settings.trainer_settings import SentinelSettings

_WINDOW = 2_000
_FIRST, _STEP, _MAX_CALLS = 600, 100, 400  # calls
_SETTINGS = SentinelSettings()


def alarms(calls: Sequence[ToolCall]) -> dict[str, bool]:
    """Return the failing tools after these calls (oldest first), and whether each pauses training."""
    found, _ = check_tool_health(calls[-_WINDOW:][::-1], _SETTINGS)
    return {one.subject: one.blocks_training for one in found if one.reason}


def calls_until_alarm(calls: Sequence[ToolCall], tool: str, start: int, rate: float, seed: int) -> int | None:
    """Return the number of calls of a tool from `start` to its alarm; None without an alarm."""
    dice, made = random.Random(seed), 0
    replayed = list(calls[:start])
    for call in calls[start : start + _MAX_CALLS]:
        mine = call.tool == tool
        sick = mine and dice.random() < rate
        replayed.append(msgspec.structs.replace(call, result=ToolResult.TIMEOUT) if sick else call)
        made += mine
        if mine and tool in alarms(replayed):
            return made
    return None


def main() -> None:
    """Print the figures of one store."""
    store = open_store(sys.argv[1])
    alias = store.policies.all()[0].alias
    calls = store.tools.newest_answered(alias, 1_000_000)[::-1]
    store.close()
    false = sum(bool(alarms(calls[:end])) for end in range(TOOL_WINDOW, len(calls) + 1, 25))
    print(f"{len(calls)} tool calls: {false} looks with an alarm")
    busiest = Counter(call.tool for call in calls).most_common(1)[0][0]
    for rate in (0.5, 0.75, 1.0):
        starts = range(_FIRST, len(calls) - _MAX_CALLS, _STEP)
        found = [calls_until_alarm(calls, busiest, start, rate, start) for start in starts]
        seen = [count for count in found if count is not None]
        print(
            f"{busiest} fails in {rate:.0%}: seen {len(seen)} of {len(found)} times, after {statistics.median(seen):g} "
            f"of its calls on the median, {max(seen)} at most"
        )


if __name__ == "__main__":
    main()
