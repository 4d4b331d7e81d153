"""`ratchet up` and `ratchet doctor` on the real vLLM, with the tiny policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ratchet.project import ROOT, Project, is_alive

POLICY = ROOT / "examples" / "email_search" / "policy"


@pytest.mark.e2e
def test_all_four_proofs_pass_on_the_real_vllm_and_down_leaves_nothing(tmp_path: Path) -> None:
    project = Project(tmp_path)
    vllm = {"port": project.content["vllm"]["port"], "max_model_len": 1024}
    project.write(base_model=str(POLICY), vllm=vllm, trainer={"judge": "examples.email_search.judge:judge"})
    try:
        up = project.run("up", "--detach", seconds=300)
        assert up.returncode == 0, up.stdout
        pids = [int(file.read_text().split()[0]) for file in (project.state / "run").glob("*.pid")]
        doctor = project.run("doctor", "--json", seconds=120)
        findings = json.loads(doctor.stdout)
        assert [finding["name"] for finding in findings] == ["vllm", "capture", "gradient", "swap"]
        assert all(finding["passed"] for finding in findings), findings
        assert doctor.returncode == 0
        status = json.loads(project.run("status", "--json").stdout)
        assert status["store"]["dropped"] == {"doctor": 1}
        assert project.run("down").returncode == 0
        assert not [pid for pid in pids if is_alive(pid)]
    finally:
        project.stop()
