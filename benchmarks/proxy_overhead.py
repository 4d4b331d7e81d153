"""The cost of a call through the proxy, compared with a minimal proxy (the floor) and LiteLLM's, against its targets.

Each server runs alone on one core; upstream and load share another one. Ratchet runs with its defaults: every call is
captured and durable before its last byte (`capture: strict`), with shipper and store on the same core. Its CPU time is
that of all its processes until everything is in the store. Rows without the writer: the store's writer stands still
meanwhile, as if it had a core and a disk of its own. Requests have 4 KB, responses 5 KB with token ids and
logprobs; every prompt is new, so no cache helps. Agents' calls have 92 KB: 40 turns, 20 tools, code in the results.
Added latency is the difference to direct calls in the same run.

    python -m benchmarks.proxy_overhead [--calls 20000] [--seconds 4] [--only ratchet two_workers] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import agent_shapes, contenders, wire_load
from benchmarks.contenders import Contender, NotRun, on_core
from benchmarks.wire_load import Target
from benchmarks.wire_upstream import CHUNKS, MODEL
from ratchet.output import progress_bars

_SERVERS: dict[str, Callable[[int, Path, int], AbstractContextManager[Contender]]] = {
    "ratchet": contenders.ratchet,
    "floor": contenders.floor,
    "synced_floor": partial(contenders.floor, synced=True),  # what the disk adds to any proxy that keeps its calls
    "litellm": contenders.litellm,
    "two_workers": partial(contenders.ratchet, workers=2),  # on the same core: what a call costs in all processes
}
_USUAL = ("ratchet", "floor", "synced_floor", "litellm")
_STEPS = 7
_AGENTS = 12  # for each second
_OWN_TURNS = 12  # of each agent that are measured, after 40
_SLOW = 40  # LiteLLM makes so many times fewer calls for the memory's row
_STALL = 0.005  # seconds


@dataclass
class ServerFigures:
    """What was measured of one server. Latencies are ms, CPU is microseconds, memory MB by process."""

    name: str
    not_run: str = ""
    cpu_call: float = 0.0
    cpu_alone: float = 0.0  # one call at a time
    added_p50: float = 0.0
    added_p99: float = 0.0
    rate: float = 0.0  # calls a second while the load lasts
    rate_done: float = 0.0  # with what is done after the answers
    cpu_chunk: float = 0.0
    memory: list[float] = field(default_factory=list)
    memory_after: list[float] = field(default_factory=list)
    calls: int = 0  # before memory_after
    own_cpu: float = 0.0  # an agent's call of 92 KB whose history is the server's own
    own_p50: float = 0.0  # added
    foreign_cpu: float = 0.0  # the same, with a history that is new to the server
    foreign_p50: float = 0.0
    beside_max: float = 0.0  # of small calls while large ones pass
    beside_stalls: float = 0.0  # percent of them that took 5 ms more than the median
    alone_stalls: float = 0.0  # the same without large calls
    has_writer: bool = False  # the next four: while it stands still
    apart_p50: float = 0.0  # added
    apart_p99: float = 0.0
    apart_stalls: float = 0.0
    apart_beside_stalls: float = 0.0


class _Load(NamedTuple):
    """Results of a load: seconds and CPU microseconds per call, calls per second without and with later work."""

    seconds: list[float]
    cpu: float
    rate: float
    rate_done: float


def measure(
    found: ServerFigures, server: Contender, straight: Target, seconds: float, step: Callable[[str], None]
) -> None:
    """Measure one server into `found`; `step` is called for every row."""
    target = server.target
    make = wire_load.request(target)
    wire_load.during(target, make, min(1.0, seconds), 8)
    server.rest()
    found.memory = server.memory()

    step("latency")
    direct = _cuts(wire_load.during(straight, wire_load.request(straight), seconds / 2, 1))
    alone = _load(server, make, seconds, 1)
    through = _cuts(alone.seconds)
    found.added_p50, found.added_p99 = through[0] - direct[0], through[1] - direct[1]
    found.cpu_alone, found.alone_stalls = alone.cpu, _stalls(alone.seconds)

    step("calls")
    _, found.cpu_call, found.rate, found.rate_done = _load(server, make, seconds, 32)

    step("streams")
    found.cpu_chunk = _load(server, wire_load.request(target, stream=True), seconds, 8).cpu / CHUNKS

    step("large calls")
    beside = wire_load.beside(target, make, wire_load.request(target, user=wire_load.LARGE_USER), seconds, 1)
    found.beside_max, found.beside_stalls = 1000 * max(beside), _stalls(beside)
    server.rest()
    if server.writer is not None:
        step("without the writer")
        _measure_without_writer(found, server, direct, seconds)

    step("agents")
    _measure_agents(found, server, straight, seconds)

    step("memory")
    wire_load.many(target, make, found.calls, 8)
    server.rest()
    found.memory_after = server.memory()


def _measure_without_writer(
    found: ServerFigures, server: Contender, direct: tuple[float, float], seconds: float
) -> None:
    """Measure what callers wait for while the store's writer stands still. `direct`: p50 and p99 of direct calls."""
    make = wire_load.request(server.target)
    large = wire_load.request(server.target, user=wire_load.LARGE_USER)
    found.has_writer = True
    with server.without_writer():
        alone = wire_load.during(server.target, make, seconds, 1)
    with server.without_writer():
        beside = wire_load.beside(server.target, make, large, seconds, 1)
    through = _cuts(alone)
    found.apart_p50, found.apart_p99 = through[0] - direct[0], through[1] - direct[1]
    found.apart_stalls, found.apart_beside_stalls = _stalls(alone), _stalls(beside)


def _measure_agents(found: ServerFigures, server: Contender, straight: Target, seconds: float) -> None:
    """Measure agents' calls: the last turns of agents' own, then conversations that are new. CPU in company."""
    makes = [wire_load.agent_request(server.target, seed) for seed in range(8)]
    direct = wire_load.during(straight, wire_load.agent_request(straight, 0), seconds / 2, 1)

    def foreign(number: int) -> bytes:
        return makes[number % 8](number)

    found.foreign_p50 = _added(wire_load.during(server.target, foreign, seconds, 1), direct)
    found.foreign_cpu = _load(server, foreign, seconds, 8).cpu
    agents = wire_load.Agents(server.target, max(2, round(_AGENTS * seconds)))
    agents.turns(agent_shapes.TURNS)
    server.rest()
    before = server.cpu()
    own = agents.turns(_OWN_TURNS)
    server.rest()
    found.own_cpu = 1e6 * (server.cpu() - before) / len(own)
    alone = wire_load.Agents(server.target, 1)
    alone.turns(agent_shapes.TURNS)
    found.own_p50 = _added(alone.turns(2 * _OWN_TURNS), direct)


def _added(seconds: Sequence[float], direct: Sequence[float]) -> float:
    return 1000 * (statistics.median(seconds) - statistics.median(direct))


def _load(server: Contender, make: wire_load.Make, seconds: float, concurrency: int) -> _Load:
    server.rest()  # else what earlier calls left to write counts as this load's
    before, started = server.cpu(), time.perf_counter()
    latencies = wire_load.during(server.target, make, seconds, concurrency)
    took = time.perf_counter() - started
    after = server.rest()
    count = len(latencies)
    return _Load(latencies, 1e6 * (server.cpu() - before) / count, count / took, count / (took + after))


def _cuts(seconds: Sequence[float]) -> tuple[float, float]:
    """Return p50 and p99 in milliseconds."""
    parts = statistics.quantiles(seconds, n=100)
    return 1000 * parts[49], 1000 * parts[98]


def _stalls(seconds: Sequence[float]) -> float:
    """Return the percentage that took 5 ms more than the median."""
    usual = statistics.median(seconds)
    return 100 * sum(one > usual + _STALL for one in seconds) / len(seconds)


def run(names: Sequence[str], seconds: float, calls: int) -> list[ServerFigures]:
    """Measure each server alone. Raises NotRun if no measurement is possible."""
    server_core, load_core = contenders.cores()
    results = [ServerFigures(name, calls=calls // _SLOW if name == "litellm" else calls) for name in names]
    with progress_bars() as report_progress, contenders.upstream(load_core) as port:
        straight = Target(port, MODEL, contenders.CAPTURE_FIELDS)
        for found in results:

            def step(_: str, name: str = found.name) -> None:
                report_progress(name, 1, _STEPS)

            with tempfile.TemporaryDirectory() as folder:
                try:
                    with _SERVERS[found.name](server_core, Path(folder), port) as server, on_core(load_core):
                        measure(found, server, straight, seconds, step)
                except NotRun as reason:
                    found.not_run = str(reason)
    return results


_ROWS: list[tuple[str, str, Callable[[ServerFigures], str]]] = [
    ("CPU per call, 32 at a time, us", "<= 439", lambda f: f"{f.cpu_call:,.0f}"),
    ("CPU per call, one at a time, us", "", lambda f: f"{f.cpu_alone:,.0f}"),
    ("added latency, one at a time, p50 / p99, ms", "0.5 / 2", lambda f: f"{f.added_p50:.2f} / {f.added_p99:.2f}"),
    ("  without the writer", "0.5 / 2", lambda f: _apart(f, f"{f.apart_p50:.2f} / {f.apart_p99:.2f}")),
    ("calls per second on one core", "", lambda f: f"{f.rate:,.0f}"),
    ("  with everything written behind them", "", lambda f: f"{f.rate_done:,.0f}"),
    ("CPU per streamed chunk, us", "<= 40", lambda f: f"{f.cpu_chunk:,.1f}"),
    ("agent's call, 92 KB, own history, CPU, us", "<= 900", lambda f: f"{f.own_cpu:,.0f}"),
    ("  added p50, ms", "1.5", lambda f: f"{f.own_p50:.2f}"),
    ("  history never seen, CPU, us", "<= 3,000", lambda f: f"{f.foreign_cpu:,.0f}"),
    ("  added p50, ms", "5", lambda f: f"{f.foreign_p50:.2f}"),
    ("resident memory at first, MB", "<= 150", lambda f: _sum(f.memory)),
    ("  after so many calls", "flat", lambda f: f"{_sum(f.memory_after)} ({f.calls:,})"),
    ("longest call beside 100 KB in, 160 KB out, ms", "", lambda f: f"{f.beside_max:.1f}"),
    ("  calls stalled by more than 5 ms", "<= 0.1%", lambda f: f"{f.beside_stalls:.2f}%"),
    ("  without the writer", "<= 0.1%", lambda f: _apart(f, f"{f.apart_beside_stalls:.2f}%")),
    ("  without large calls", "<= 0.1%", lambda f: f"{f.alone_stalls:.2f}%"),
    ("  without large calls and the writer", "<= 0.1%", lambda f: _apart(f, f"{f.apart_stalls:.2f}%")),
]  # fmt: skip


def _apart(found: ServerFigures, text: str) -> str:
    return text if found.has_writer else ""


def _sum(parts: Sequence[float]) -> str:
    return " + ".join(f"{part:.0f}" for part in parts)


def table(results: Sequence[ServerFigures]) -> str:
    """Return the results beside the aims."""
    lines = [f"{'':46} {'aim':>9}" + "".join(f" {found.name:>18}" for found in results)]
    for title, aim, cell in _ROWS:
        cells = ("not run" if found.not_run else cell(found) for found in results)
        lines.append(f"{title:46} {aim:>9}" + "".join(f" {text:>18}" for text in cells))
    lines += [f"{found.name} was not run: {found.not_run}" for found in results if found.not_run]
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000, help="before the memory is read again")
    parser.add_argument("--seconds", type=float, default=4.0, help="of load for each row")
    parser.add_argument("--only", nargs="+", choices=list(_SERVERS), default=list(_USUAL))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    litellm_version = ""
    if "litellm" in options.only:
        with contextlib.suppress(NotRun):
            litellm_version = f", LiteLLM {contenders.prepare_litellm()}"
    results = run(options.only, options.seconds, options.calls)
    if options.json:
        print(json.dumps([asdict(found) for found in results]))
    else:
        print(f"One core each, Python {platform.python_version()}{litellm_version}; strict capture; 4 KB in, 5 KB out")
        print(table(results))


if __name__ == "__main__":
    main()
