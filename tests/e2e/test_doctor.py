"""`ratchet doctor` on the real vLLM, with the tiny policy."""

from __future__ import annotations

import json

import pytest

from tests.ratchet.project import Project


@pytest.mark.e2e
def test_all_four_proofs_pass_on_the_real_vllm(project: Project) -> None:
    doctor = project.run("doctor", "--json", seconds=120)
    findings = json.loads(doctor.stdout)
    assert [finding["name"] for finding in findings] == ["vllm", "capture", "gradient", "swap"]
    assert all(finding["passed"] for finding in findings), findings
    assert doctor.returncode == 0
    status = json.loads(project.run("status", "--json").stdout)
    assert status["store"]["dropped"]["doctor"] == 1
