"""`ratchet doctor --proxy` with services that were started separately: no project is up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ratchet.store.reasons import DropReason
from ratchet.store.store import open_store
from ratchet.trainer.learner_api import TOKEN_VARIABLE
from tests.harness.cli.project import Project
from tests.harness.proxy.running_proxy import running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually, served
from tests.harness.trainer.scripted_learner import TOKEN, ScriptedHost, scripted_service
from tests.proxy.test_keys import made

JUDGE = {"kind": "workflow"}  # of rollouts, without which there is nothing to check


def _doctor(project: Project, *words: str, **environ: str) -> tuple[int, dict[str, Any]]:
    done = project.call("doctor", *words, "--json", **environ)
    return done.returncode, {one["name"]: one for one in json.loads(done.stdout)}


@pytest.mark.slow
def test_services_without_a_project_are_checked_and_what_needs_one_is_skipped(
    project: Project, store_file: Path, tmp_path: Path
) -> None:
    project.write(model="agent", trainer={"judge": JUDGE, "resample": {"samples": 2}})
    store = open_store(str(store_file))
    with (
        served(ScriptedVllm()) as vllm_url,
        running(vllm_url, store, tmp_path) as proxy,
        scripted_service(ScriptedHost(), project.state / "models") as learner,
    ):
        project.write(learner={"url": learner.url})
        words = ("--proxy", f"{proxy.url}/v1", "--store", str(store_file))
        code, found = _doctor(project, *words, **{TOKEN_VARIABLE: TOKEN})
        assert code == 0, found
        assert [name for name, one in found.items() if one["passed"]] == ["capture", "gradient", "judge"]
        skipped = [name for name, one in found.items() if one["skipped"]]
        assert skipped == ["vllm", "swap", "resampling"]
        assert all("needs a project started by `ratchet up`" in found[name]["seen"] for name in skipped)
        (dropped,) = store.trajectories.page()
        assert dropped.drop_reason == DropReason.DOCTOR
        shown = project.call("doctor", *words, **{TOKEN_VARIABLE: TOKEN})
        assert "skip  swap" in shown.stdout
        assert shown.stdout.index("...   gradient") < shown.stdout.index("pass  gradient")
        assert "FAIL" not in shown.stdout

        code, found = _doctor(project, *words[:2], "--store", "typo.db", **{TOKEN_VARIABLE: TOKEN})
        assert (code, "there is no store at" in found["capture"]["seen"]) == (1, True)
        assert not (project.folder / "typo.db").exists()

        key, _ = made(store)
        eventually(lambda: proxy.http.get("/v1/models").status_code == 401)
        code, found = _doctor(project, *words, **{TOKEN_VARIABLE: TOKEN})
        assert (code, "RATCHET_API_KEYS is not set" in found["capture"]["seen"]) == (1, True)
        code, _ = _doctor(project, *words, **{TOKEN_VARIABLE: TOKEN, "RATCHET_API_KEYS": key})
        assert code == 0
    store.close()
