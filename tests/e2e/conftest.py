"""One project on the real vLLM for all tests that need no model of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.cli.project import ROOT, Project, is_alive

POLICY = ROOT / "ratchet" / "demo" / "email_search" / "policy"


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The tiny policy, served, judged and trained by `ratchet up` as "mail"; `ratchet down` leaves nothing of it."""
    made = Project(tmp_path_factory.mktemp("mail"))
    vllm = {"port": made.content["vllm"]["port"], "max_model_len": 1024, "dtype": "float32"}
    made.write(
        base_model=str(POLICY), vllm=vllm, model="mail", trainer={"judge": "ratchet.demo.email_search.tasks:judge"}
    )
    try:
        up = made.run("up", "--detach", seconds=300)
        assert up.returncode == 0, up.stdout
        pids = [int(file.read_text().split()[0]) for file in (made.state / "run").glob("*.pid")]
        assert len(pids) >= 4
        yield made
        assert made.run("down").returncode == 0
        assert not [pid for pid in pids if is_alive(pid)]
    finally:
        made.stop()
