"""Fixtures of the examples' tests: a built mailbox with its task set, and a proxy before a model that plays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ratchet.demo.email_search.__main__ import main
from ratchet.demo.email_search.mailbox import DATABASE, Mailbox
from ratchet.demo.email_search.tasks import MailTask, read_tasks
from ratchet.store.store import open_store
from tests.harness.proxy.running_proxy import Proxy, running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.scripts import Messages, Script
from tests.harness.proxy.servers import served


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `build-db` writes it; never written to."""
    folder = tmp_path_factory.mktemp("email_search")
    assert main(["build-db", "--home", str(folder)]) == 0
    return folder


@pytest.fixture
def box(home: Path) -> Iterator[Mailbox]:
    """The built mailbox."""
    opened = Mailbox(home / DATABASE)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def task(home: Path) -> MailTask:
    """The first held-out task."""
    return read_tasks(home, "test")[0]


@pytest.fixture
def play(store_file: Path, tmp_path: Path) -> Iterator[Callable[[Callable[[Messages], Script]], Proxy]]:
    """A running proxy in front of a scripted model; its store is `proxy.store`."""
    with contextlib.ExitStack() as stack:

        def start(model: Callable[[Messages], Script]) -> Proxy:
            store = stack.enter_context(open_store(str(store_file)))
            url = stack.enter_context(served(ScriptedVllm(play=lambda body: model(body["messages"]))))
            return stack.enter_context(running(url, store, tmp_path))

        yield start
