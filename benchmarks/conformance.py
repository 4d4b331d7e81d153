"""Questions and public conformance suites on a real vLLM, directly and through the proxy: where do they differ?

What differs is the proxy's doing; what fails both ways is the upstream's. The e-mail example's tiny policy answers,
greedily. Questions that vLLM serves itself (Chat Completions, Completions, errors) must be answered alike but for ids,
times, the model's name and the words of a refusal; the suites (CompatCanary, llm-comply) must pass whatever they pass
directly.

    python -m benchmarks.conformance [--exact-context off|on|auto] [--json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.real_questions import QUESTIONS, answer_to
from tests.harness.clients.program import compatcanary_report
from tests.harness.proxy.servers import ProxyProcess, eventually
from tests.harness.vllm.engine import vllm

POLICY = Path(__file__).parents[1] / "ratchet" / "demo" / "email_search" / "policy"
FORMS = ("openai-chat", "open-responses", "anthropic")
PROFILES = ("chat", "modern")


@dataclass(frozen=True)
class Check:
    """One question or probe, asked both ways."""

    suite: str
    name: str
    direct: str
    proxied: str
    fine: bool  # alike, or passed through the proxy alone


def questions(direct: tuple[str, str], proxied: tuple[str, str]) -> list[Check]:
    """Put every question both ways; a place is (URL, model)."""
    found = []
    for name, (path, body) in QUESTIONS.items():
        theirs, ours = (answer_to(url, path, body, model) for url, model in (direct, proxied))
        found.append(Check("questions", name, theirs, ours, fine=_alike(theirs, ours)))
    return found


def _alike(theirs: str, ours: str) -> bool:
    """Return whether two answers are the same, or two refusals; ours may be of what theirs fails at."""
    statuses = theirs[:3], ours[:3]
    return theirs == ours or (ours[0] == "4" and (statuses[0] == statuses[1] or theirs[0] == "5"))


def suite(
    name: str, run: Callable[[str, str], Mapping[str, str]], direct: tuple[str, str], proxied: tuple[str, str]
) -> list[Check]:
    """Run a suite both ways: what it says of each probe, empty where that passed."""
    theirs, ours = run(*direct), run(*proxied)
    probes = dict.fromkeys((*theirs, *ours))
    return [
        Check(
            name,
            probe,
            theirs.get(probe, "left out"),
            ours.get(probe, "left out"),
            fine=not ours.get(probe, "left out") or ours.get(probe) == theirs.get(probe),
        )
        for probe in probes
    ]


def canary(profile: str) -> Callable[[str, str], Mapping[str, str]]:
    """CompatCanary with a profile."""

    def run(url: str, model: str) -> Mapping[str, str]:
        report = compatcanary_report(url, model, profile)
        return {
            one["id"]: "" if one["status"] == "pass" else f"{one['status']}: {one.get('summary', '')}"
            for one in report["results"]
        }

    return run


def comply(form: str) -> Callable[[str, str], Mapping[str, str]]:
    """llm-comply with a format."""

    def run(url: str, model: str) -> Mapping[str, str]:
        tool = Path(sys.executable).parent / "llm-comply"
        command = [str(tool), "--format", form, "-u", f"{url}/v1", "-k", "x", "-m", model, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        results: list[dict[str, Any]] = json.loads(done.stdout)["results"]
        return {
            one["id"]: "" if one["status"] == "passed" else "; ".join(sorted(one["errors"]))[:400] for one in results
        }

    return run


def run(folder: Path, exact_context: str) -> list[Check]:
    """Start everything in an empty folder, ask, and stop it."""
    with vllm(POLICY, folder / "vllm.log", max_model_len=1024) as url:
        name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        proxy = ProxyProcess(folder, upstreams=[url], model="mail", exact_context=exact_context)
        try:
            eventually(lambda: httpx.get(f"{proxy.url}/health/ready").status_code == 200, 60)
            direct, proxied = (url, name), (proxy.url, "mail")
            answer_to(url, *QUESTIONS["chat"], name)  # the first call of an engine is slow
            found = questions(direct, proxied)
            for profile in PROFILES:
                found += suite(f"compatcanary {profile}", canary(profile), direct, proxied)
            for form in FORMS:
                found += suite(f"llm-comply {form}", comply(form), direct, proxied)
        finally:
            proxy.stop()
    return found


def main() -> None:
    """Print what differs; fail where the proxy makes anything worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exact-context", choices=("off", "on", "auto"), default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), options.exact_context)
    if options.json:
        print(json.dumps([asdict(one) for one in found]))
    else:
        for name in dict.fromkeys(one.suite for one in found):
            own = [one for one in found if one.suite == name]
            alike, better = (
                sum(one.fine and (one.direct == one.proxied) is same for one in own) for same in (True, False)
            )
            print(f"{name:28} {len(own):3} checks: {alike} alike, {better} passed through the proxy alone")
        for one in found:
            if one.direct != one.proxied:
                print(f"{'better' if one.fine else 'WORSE'}: {one.suite}: {one.name}")
                print(f"  direct: {one.direct}\n  proxy:  {one.proxied}")
        print(f"{time.monotonic() - started:.0f} s")
    sys.exit(0 if all(one.fine for one in found) else 1)


if __name__ == "__main__":
    main()
