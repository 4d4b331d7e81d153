"""Calls per second of the proxy by its workers, on a machine of 16 cores.

    python -m benchmarks.gpu.worker_scaling [SECONDS] [WORKERS ...]

Short calls (4 KB in, 5 KB out with ids and logprobs), capture strict, on the benchmark's own client and upstream. The
proxy's processes run on cores 0 to n (n workers, and one core for coordinator and writer), five load processes and
three upstreams on the last eight cores or, on a small machine, on all.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import contenders, wire_load
from tests.harness.proxy.servers import ProxyProcess

_AT_ONCE = 24


def load(port: int, cores: set[int], seconds: float, answered: Any) -> None:
    """Send calls from a process of its own; put the latencies into the queue."""
    os.sched_setaffinity(0, cores)
    target = wire_load.Target(port, "agent")
    answered.put(wire_load.during(target, wire_load.request(target), seconds, _AT_ONCE))


def latencies(port: int, cores: set[int], seconds: float, processes: int) -> list[float]:
    """Return the sorted latencies of that many load processes."""
    answered: Any = multiprocessing.Queue()
    clients = [multiprocessing.Process(target=load, args=(port, cores, seconds, answered)) for _ in range(processes)]
    for client in clients:
        client.start()
    found = sorted(second for _ in clients for second in answered.get(timeout=seconds + 60))
    for client in clients:
        client.join()
    return found


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 6.0
    every = [int(workers) for workers in sys.argv[2:]] or [1, 2, 4, 7]
    cores = sorted(os.sched_getaffinity(0))
    big = len(cores) >= 16
    others = set(cores[8:]) if big else set(cores)
    first = None
    for workers in every:
        with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
            ports = [stack.enter_context(contenders.upstream(core)) for core in sorted(others)[-3:]]
            os.sched_setaffinity(0, set(cores[: workers + 1]) if big else set(cores))
            upstreams = [f"http://127.0.0.1:{port}" for port in ports]
            proxy = ProxyProcess(Path(folder), upstreams=upstreams, workers=workers)
            stack.callback(proxy.stop)
            contenders.wait_for(f"{proxy.url}/health/ready", 30)
            os.sched_setaffinity(0, set(cores))
            port = int(proxy.url.rsplit(":", 1)[1])
            latencies(port, others, 1.0, 5 if big else 1)  # untimed
            found = latencies(port, others, seconds, 5 if big else 1)
            rate = len(found) / seconds
            first = first or rate / workers
            p50, p99 = (1e3 * found[int(len(found) * share)] for share in (0.5, 0.99))
            print(
                f"workers {workers}: {rate:,.0f} calls/s, {rate / first / workers:.2f} of linear, "
                f"p50 {p50:.1f} ms, p99 {p99:.1f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
