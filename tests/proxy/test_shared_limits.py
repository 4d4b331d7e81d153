"""Limits of several workers: how far they may be exceeded, for any order and any delay of the reports."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ratchet.proxy.coordinator.limits.sharing import SharedBucket, SharedLimits
from ratchet.proxy.coordinator.limits.token_budgets import Budgets, TokenBudget
from ratchet.proxy.errors import RateLimited
from ratchet.proxy.messages.coordinator_messages import Amounts, Answer, Levels
from ratchet.proxy.worker.coordination.limit_reports import LimitReports
from ratchet.proxy.worker.http.parallel_requests import ParallelRequests, QueueLimits
from ratchet.store.operation_records import KeyTokens
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import ProxyProcess, eventually, served
from tests.proxy.test_parallel_requests import Held, ask, in_loop, turn

LIMIT = 60
DAY = KeyTokens("2026-11-23", 0, 0)


class Post:
    """The coordinator, whose answers come when the test says so. `now` is the clock of all."""

    def __init__(self, workers: int) -> None:
        self.now = 0.0
        self.latest = 0.0  # the longest time between two answers to a worker
        self._answered_at = [0.0] * workers
        self.limits = SharedLimits()
        self.reports = [LimitReports(workers, lambda: self.now) for _ in range(workers)]
        self._open: list[tuple[int, Amounts, asyncio.Future[Answer | None]]] = []
        for number in range(workers):
            self.connect(number)

    def connect(self, number: int) -> None:
        def send(amounts: Amounts) -> asyncio.Future[Answer | None]:
            future: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
            self._open.append((number, amounts, future))
            return future

        self.reports[number].connect(send)

    async def answer(self, place: int = 0) -> None:
        """Answer one of the reports under way, if there is any."""
        if self._open:
            number, amounts, future = self._open.pop(place % len(self._open))
            levels = self.limits.count(str(number), amounts.amounts, self.now)
            future.set_result(Levels(levels, len(self.reports)))
            self._answered_at[number] = self.now
            await asyncio.sleep(0)

    async def lose_all(self) -> None:
        """The coordinator is away: every report under way fails."""
        for one in self.reports:
            one.disconnect()
        for _, _, future in self._open:
            future.set_result(None)
        self._open.clear()
        await asyncio.sleep(0)

    async def exchange(self) -> None:
        """Send and answer every report."""
        for _ in range(2):
            for one in self.reports:
                one.send()
            while self._open:
                await self.answer()

    async def steps(self, dice: random.Random, number: int) -> None:
        """Let time pass, and reports be sent and answered, in any order."""
        for _ in range(number):
            self.now += dice.choice((0.0, 0.0, 0.01, 1.0))
            if dice.random() < 0.3:
                dice.choice(self.reports).send()
            if dice.random() < 0.3:
                await self.answer(dice.randrange(100))
            self.latest = max(self.latest, self.now - min(self._answered_at))


def buckets(post: Post) -> list[SharedBucket]:
    return [SharedBucket("key a", "requests", LIMIT, post.now, one) for one in post.reports]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("workers", [2, 4])
def test_however_late_the_reports_workers_take_a_minutes_worth_each_beyond_what_time_gives(
    seed: int, workers: int
) -> None:
    async def run() -> None:
        post, dice, taken = Post(workers), random.Random(seed), 0
        shared = buckets(post)
        for _ in range(2000):
            await post.steps(dice, 1)
            for _ in range(dice.choice((0, 1, 5, 100))):
                taken += not dice.choice(shared).take(1, post.now)
            assert taken <= LIMIT * (post.now + (workers - 1) * post.latest) / 60 + LIMIT * workers
        assert taken >= LIMIT * post.now / 60 - LIMIT, "and time's worth is given"

    asyncio.run(run())


@in_loop
async def test_workers_that_know_of_each_other_take_one_limit_together_and_give_back_for_all() -> None:
    post = Post(4)
    shared = buckets(post)
    taken = 0
    for _ in range(100):
        for one in shared:
            taken += not one.take(1, post.now)
            await post.exchange()
    assert LIMIT <= taken < LIMIT + 4, "each other worker may take one more before it asks"
    shared[0].give(10 + taken - LIMIT, post.now)
    await post.exchange()
    shared[1].take(LIMIT, post.now)  # more than there is: it asks for what another one returned
    await post.exchange()
    assert sum(not shared[1].take(1, post.now) for _ in range(100)) == 10


@pytest.mark.parametrize("seed", range(4))
def test_without_the_coordinator_the_workers_parts_are_the_limit_together(seed: int) -> None:
    async def run() -> None:
        post, dice = Post(4), random.Random(seed)
        shared = buckets(post)
        for one in shared:
            one.take(dice.randrange(10), post.now)
        await post.exchange()
        await post.lose_all()
        began, taken = post.now, 0
        for _ in range(500):
            post.now += dice.choice((0.0, 0.1, 1.0))
            taken += not dice.choice(shared).take(1, post.now)
            assert taken <= LIMIT * ((post.now - began) / 60 + 1)
        post.limits = SharedLimits()  # it has restarted
        for number in range(4):
            post.connect(number)
        await post.exchange()
        for one in shared:
            one.take(0, post.now)  # each asks what all took
        await post.exchange()
        levels = [one.wait(LIMIT, post.now) for one in shared]
        assert levels == pytest.approx([levels[0]] * 4), "all know what was taken meanwhile"

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(4))
def test_parallel_requests_exceed_their_limit_by_one_part_of_each_other_worker(seed: int) -> None:
    async def run() -> None:
        limit, workers = 8, 4
        post, dice = Post(workers), random.Random(seed)
        apps = [Held() for _ in range(workers)]
        limited = [
            ParallelRequests(app, QueueLimits(None, 1000, 1000, 600.0), reports)
            for app, reports in zip(apps, post.reports, strict=True)
        ]
        tasks, open_names = [], []
        for number in range(400):
            place = dice.randrange(workers)
            tasks.append(ask(limited[place], "a", str(number), limit))
            await turn()
            await post.steps(dice, 3)
            running = [(app, name) for app in apps for name in app.order if name not in open_names]
            assert len(running) <= limit + (workers - 1) * limit // workers
            if dice.random() < 0.5 and running:
                app, name = dice.choice(running)
                open_names.append(name)
                await app.let_go(name)
        while sum(len(app.order) for app in apps) < len(tasks) or not all(task.done() for task in tasks):
            await post.exchange()
            for app in apps:
                for name in app.order:
                    await app.let_go(name)
        await asyncio.gather(*tasks)
        assert [one.running for one in limited] == [0] * workers

    asyncio.run(run())


@in_loop
async def test_the_other_workers_learn_at_once_of_an_end_at_the_limit() -> None:
    post = Post(2)
    apps = [Held(), Held()]
    first, second = [
        ParallelRequests(app, QueueLimits(None, 0, 0, 600.0), reports)
        for app, reports in zip(apps, post.reports, strict=True)
    ]

    async def settle() -> None:
        """Answer what was sent by now: the clock stands, so nothing is sent because of the interval."""
        for _ in range(4):
            await turn()
            await post.answer()

    tasks = [ask(first, "a", "1", 1)]
    await settle()
    tasks.append(ask(second, "a", "2", 1))  # each other worker may begin one before it asks
    await settle()
    await apps[1].let_go("2")
    await settle()
    await apps[0].let_go("1")
    await settle()
    tasks.append(ask(second, "a", "3", 1))
    await settle()
    assert apps[1].order == ["2", "3"], "the other worker knows of the end"
    await apps[1].let_go("3")
    await asyncio.gather(*tasks)


@in_loop
async def test_a_budget_is_used_up_by_the_calls_of_all_workers() -> None:
    post = Post(3)
    budgets = [TokenBudget(Budgets(per_day=100), DAY, "key a", one) for one in post.reports]
    now = 1795392000.0  # within the day of `DAY`, 2026-11-23
    budgets[0].add(60, now)
    budgets[1].add(39, now)
    await post.exchange()
    for one in budgets:
        one.check(now)
    await post.lose_all()
    budgets[0].add(1, now)
    post.connect(0)
    post.connect(2)
    await post.exchange()
    with pytest.raises(RateLimited, match="100 tokens"):
        budgets[2].check(now)


@pytest.fixture
def vllm() -> Iterator[tuple[ScriptedVllm, str]]:
    scripted = ScriptedVllm()
    with served(scripted) as url:
        yield scripted, url


@pytest.mark.slow
def test_a_request_at_one_worker_counts_at_the_other(tmp_path: Path, vllm: tuple[ScriptedVllm, str]) -> None:
    proxy = ProxyProcess(
        tmp_path, upstreams=[vllm[1]], workers=2, max_parallel_requests_per_key=1, max_waiting_requests=0
    )
    long: Any = {
        "model": "agent",
        "messages": [{"role": "user", "content": "#tokens=9000 #delay=0.05"}],
        "stream": True,
    }
    short: Any = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}

    def status() -> int:
        """Send a call over a connection of its own, which any worker may take."""
        return httpx.post(f"{proxy.url}/v1/chat/completions", json=short, timeout=60).status_code

    try:
        eventually(lambda: httpx.get(f"{proxy.url}/health/ready").status_code == 200)
        with httpx.stream("POST", f"{proxy.url}/v1/chat/completions", json=long, timeout=60) as running:
            assert running.status_code == 200
            eventually(lambda: {status() for _ in range(16)} == {429})
        eventually(lambda: status() == 200)
        assert [status() for _ in range(64)].count(200) > 60, "one call after the other is within the limit"
    finally:
        proxy.stop(signal.SIGKILL)
