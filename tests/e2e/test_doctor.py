"""`ratchet doctor` on the real vLLM, with the tiny policy."""

from __future__ import annotations

import json

import pytest

from tests.harness.cli.project import Project


@pytest.mark.e2e
def test_all_proofs_pass_on_the_real_vllm(project: Project) -> None:
    (project.folder / "half.py").write_text(
        "def judge(response):\n    return 1.0 if response == 'Oslo' else 0.5 * bool(response.strip())\n"
    )
    given = ("--question", "What is the capital of Norway?", "--answer", "Oslo")
    doctor = project.run("doctor", "--judge", "half:judge", *given, "--json", seconds=120)
    findings = json.loads(doctor.stdout)
    assert [finding["name"] for finding in findings] == ["vllm", "capture", "gradient", "swap", "batches", "judge"]
    assert all(finding["passed"] for finding in findings), findings
    assert doctor.returncode == 0
    status = json.loads(project.run("status", "--json").stdout)
    assert status["store"]["dropped"]["doctor"] >= 1


@pytest.mark.e2e
def test_a_sound_agent_passes_every_step_on_the_real_vllm(project: Project) -> None:
    (project.folder / "sound.py").write_text(
        "import openai\n\nHOT = {'temperature': 2.0}  # two attempts that are alike by chance fail the proof\n\n\n"
        "def run(task, base_url, api_key, model):\n"
        "    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:\n"
        "        asked = [{'role': 'user', 'content': task['question']}]\n"
        "        answer = client.chat.completions.create(model=model, messages=asked, max_tokens=24, **HOT)\n"
        "    return answer.choices[0].message.content or ''\n\n\n"
        "def judge(task, response):\n"
        "    return sum(map(ord, response)) % 997 / 997\n"  # as good as different for two answers that differ
    )
    task = json.dumps({"question": "Where is the meeting?", "answer": "hall twelve"})
    doctor = project.run(
        "doctor", "--workflow", "sound:run", "--judge", "sound:judge", "--task", task, "--json", seconds=120
    )
    findings = {finding["name"]: finding for finding in json.loads(doctor.stdout)}
    assert [name for name, finding in findings.items() if not finding["passed"]] == [], findings
    assert list(findings) == [
        "proxy", "rollouts", "calls", "tokens", "attempts", "judge", "scores", "groups", "settings",
    ]  # fmt: skip
