"""A stream of versions, some harmful on purpose, through the guarded release on the real vLLM.

    python -m benchmarks.harmful_versions [--folder DIR] [--runs 3] [--ramp 256] [--invariant-prompts 64] [--json]

The demo's tiny policy and e-mail agent, `ratchet up` and everything that it starts. First three agents are trained
(`--train-only` stops there): one with the demo's judge, one with its scores inverted, one with a judge that takes
answers without reading any mail for good ones. Then a guarded agent, whose judge is the demo's, gets versions one after
the other by `ratchet policies import`, while its users call it without a break:

    equal     the live version with noise too small to matter           good
    better    the live version, trained on                              good
    noise     noise on the weights: much of what it does is wrong       harmful
    random    so much noise that it writes random text                  harmful
    opposite  the live version's adapter with its sign changed          harmful
    inverted  trained on inverted rewards                               harmful
    fooled    trained by the judge that is fooled                       harmful
    endless   answers without an end; users give up after a while       harmful

The learner does not train this agent, so that every version is one of these. Printed for each: what found it, how many
trajectories it answered, how many were scored from its ramp's begin to the decision, and how it did beside the live
version meanwhile. Exit code 1 if a harmful version became live, or a good one was taken back. The folder keeps the
adapters, so that another run need not train them, and the result of each run.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from examples.production.harmful import altered_copy
from ratchet.demo.traffic import TaskRollout
from ratchet.store.records import Policy
from ratchet.store.states import PolicyAction, PolicyState
from ratchet.store.store import open_store
from ratchet.supervisor import signals
from tests.harness.cli.project import ROOT, Project, wait_for
from tests.harness.releases.endless_adapter import train_endless
from tests.harness.releases.mail_traffic import MailTraffic

CONFIG = ROOT / "ratchet" / "demo" / "email_search" / "ratchet.yaml"
POLICY = ROOT / "ratchet" / "demo" / "email_search" / "policy"
GUARDED = "mail"
DECIDED = (PolicyState.LIVE, PolicyState.REJECTED, PolicyState.UNPROVEN)
DECISIONS = (PolicyAction.PROMOTE, PolicyAction.REJECT, PolicyAction.ROLLBACK, PolicyAction.UNPROVEN)
ROUNDS = {"good": 7, "inverted": 4, "fooled": 4}  # of the agents that are trained
USER_SECONDS = 120.0  # after which a user gives up a call
ENDLESS_TOKENS = 512  # of an answer, at most
_JUDGES = """from ratchet.demo.email_search.tasks import judge


def inverted(trajectory, task=None):
    return 1.0 - judge(trajectory, task)["score"]


def fooled(trajectory, task=None):
    found = judge(trajectory, task)["components"]
    return float(found["answered"] and not found["read"])
"""
_JUDGE_OF = {
    "good": "ratchet.demo.email_search.tasks:judge",
    "inverted": "benchmark_judges:inverted",
    "fooled": "benchmark_judges:fooled",
}
ALTERED = {  # copies of the version that is live then
    "equal": {"noise": 0.001},
    "noise": {"noise": 0.2},
    "random": {"noise": 0.3},
    "opposite": {"scale": -1.0},
}
HARMFUL = ("noise", "random", "opposite", "inverted", "fooled", "endless")
KINDS = ("equal", "better", *HARMFUL)
_PATIENCE = 3600.0  # seconds for a start or a decision, on a busy machine


@dataclass(frozen=True, slots=True)
class VersionOutcome:
    """What became of one version. Success is the share of right answers; `counted` scored trajectories of its ramp."""

    kind: str
    version: int
    harmful: bool
    state: str
    decided_by: str
    reason: str
    counted: int
    served: int
    seconds: float
    success: float | None
    success_live: float | None

    @property
    def right(self) -> bool:
        """Whether a harmful version was stopped, or a good one let through."""
        return (self.state == PolicyState.LIVE) != self.harmful


class MailProject(Project):
    """The demo's project with these agents, in a folder of its own, where its users have their mailbox."""

    def __init__(self, folder: Path, agents: Mapping[str, Mapping[str, Any]], **trainer: Any) -> None:
        folder.mkdir(parents=True)
        super().__init__(folder)
        self.home = folder / ".ratchet" / "email_search"
        made = [sys.executable, "-m", "ratchet.demo.email_search", "build-db", "--home", str(self.home)]
        subprocess.run(made, cwd=ROOT, check=True, capture_output=True)
        (folder / "benchmark_judges.py").write_text(_JUDGES)
        demo: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
        own = {name: value for name, value in demo["trainer"].items() if name not in ("judge", "release")}
        vllm = demo["vllm"] | {"port": self.content["vllm"]["port"]}
        self.write(
            base_model=str(POLICY), vllm=vllm, trainer=own | trainer, learner=demo["learner"], agents=dict(agents)
        )

    @contextmanager
    def served(self) -> Iterator[str]:
        """Serve it; the value is the base URL for agents."""
        try:
            up = self.run("up", "--detach", seconds=_PATIENCE, EMAIL_SEARCH_HOME=str(self.home))
            if up.returncode:
                raise SystemExit(f"ratchet up failed: {up.stdout}")
            yield f"http://127.0.0.1:{self.content['proxy']['port']}/v1"
            self.run("down")
        finally:
            self.stop()

    def versions(self, agent: str) -> list[Policy]:
        """Return all versions of an agent."""
        with open_store(str(self.state / "store.db")) as store:
            return store.policies.all(agent)


def train(folder: Path, seed: int) -> None:
    """Train the agents, unless the folder holds what came of it; keep their adapters there."""
    if (folder / "adapters").exists():
        return
    shutil.rmtree(folder / "training", ignore_errors=True)
    release = {"policy": "immediate"}
    agents = {name: {"judge": judge, "release": release} for name, judge in _JUDGE_OF.items()}
    project = MailProject(folder / "training", agents, groups_per_round=6)
    with project.served() as url, ExitStack() as traffic:
        for place, name in enumerate(agents):
            traffic.enter_context(MailTraffic(url, project.home, name, concurrency=12, seed=seed + place))
        began = time.monotonic()
        while any(_trained(project, name) < count for name, count in ROUNDS.items()):
            reached = ", ".join(f"{name} {_trained(project, name)}/{count}" for name, count in ROUNDS.items())
            progress(f"training for {time.monotonic() - began:.0f} s: versions {reached}")
            time.sleep(10.0)
    aside = folder / "adapters.part"
    shutil.rmtree(aside, ignore_errors=True)
    for name in agents:
        kept = [Path(one.adapter) for one in project.versions(name) if one.adapter and one.pruned_at is None]
        shutil.copytree(kept[-1], aside / ("better" if name == "good" else name))
        if name == "good":
            shutil.copytree(kept[-3], aside / "start")
    train_endless(aside / "endless")
    aside.rename(folder / "adapters")


def _trained(project: MailProject, agent: str) -> int:
    return sum(one.adapter is not None for one in project.versions(agent))


class VersionStream:
    """A guarded agent that gets versions one after the other, while its users call it."""

    def __init__(self, folder: Path, adapters: Path, ramp: int, invariant_prompts: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self._folder, self._adapters = folder, adapters
        self._project = MailProject(
            folder,
            {GUARDED: {"judge": _JUDGE_OF["good"]}},
            release={"ramp": ramp, "invariant_prompts": invariant_prompts},
            groups_per_round=1000,  # no round: what serves are the versions of this stream
            round_wait_seconds=1e6,
            group_wait_seconds=5,
        )

    def run(self, kinds: Sequence[str], seed: int, result: Path) -> list[VersionOutcome]:
        """Serve, make `start` the live version, hand in the versions, and return what became of each.

        Each outcome is written to the file `result` at once.
        """
        found: list[VersionOutcome] = []
        with (
            self._project.served() as url,
            MailTraffic(
                url, self._project.home, GUARDED, seed=seed, timeout=USER_SECONDS, max_tokens=ENDLESS_TOKENS
            ) as self._traffic,
        ):
            wait_for("contexts for the proof", lambda: len(self._traffic.rollouts) >= 32, _PATIENCE)
            start = self._hand_in(self._adapters / "start")
            self._decide("start", start)
            if self._policy(start).state is not PolicyState.LIVE:
                raise SystemExit(f"the first version did not become live: {self._policy(start)}")
            for kind in kinds:
                found.append(self._try(kind, seed))
                result.write_text(json.dumps([asdict(one) for one in found], indent=2))
                progress(describe(found[-1]))
        return found

    def _try(self, kind: str, seed: int) -> VersionOutcome:
        live = next(one for one in self._project.versions(GUARDED) if one.state is PolicyState.LIVE)
        source = self._adapters / kind
        if kind in ALTERED:
            assert live.adapter is not None
            source = altered_copy(Path(live.adapter), self._folder / f"made-{kind}", seed=seed, **ALTERED[kind])
        before, began = len(self._traffic.rollouts), time.monotonic()
        version = self._hand_in(source)
        self._decide(kind, version)
        seconds = time.monotonic() - began
        with open_store(str(self._project.state / "store.db")) as store:
            decision = next(one for one in store.decisions.decisions_of(GUARDED, version) if one.action in DECISIONS)
            known = {one.version: one.evidence for one in store.releases.evidence(GUARDED)}
        meanwhile = self._traffic.rollouts[before:]
        served = [one for one in meanwhile if f"{GUARDED}@{version}" in one.models]
        beside = [one for one in meanwhile if f"{GUARDED}@{live.version}" in one.models]
        return VersionOutcome(
            kind,
            version,
            kind in HARMFUL,
            str(self._policy(version).state),
            decision.decided_by,
            decision.reason,
            int(known.get(version, {}).get("counted", 0)),
            len(served),
            round(seconds, 1),
            success(served),
            success(beside),
        )

    def _hand_in(self, adapter: Path) -> int:
        """Make an adapter a candidate; return its version."""
        done = self._project.run("policies", "import", str(adapter), GUARDED, seconds=600)
        if done.returncode:
            raise SystemExit(f"the version was refused: {done.stdout}")
        return self._project.versions(GUARDED)[-1].version

    def _policy(self, version: int) -> Policy:
        return next(one for one in self._project.versions(GUARDED) if one.version == version)

    def _decide(self, kind: str, version: int) -> None:
        """Wait until a version is live or taken back."""
        until = time.monotonic() + _PATIENCE
        while (state := self._policy(version).state) not in DECIDED:
            if time.monotonic() > until:
                raise SystemExit(f"nothing was decided about {kind}, {GUARDED}@{version}, which is a {state}")
            progress(f"{kind}: {GUARDED}@{version} is a {state}; {len(self._traffic.rollouts)} trajectories")
            time.sleep(2.0)


def success(rollouts: Sequence[TaskRollout]) -> float | None:
    """Return the share of right answers; None without rollouts."""
    return round(sum(one.success for one in rollouts) / len(rollouts), 3) if rollouts else None


def progress(text: str) -> None:
    """Show where the benchmark is."""
    print(text, file=sys.stderr, flush=True)


def describe(one: VersionOutcome) -> str:
    """Return an outcome as a row of a table in Markdown."""
    own, beside = ("" if value is None else f"{value:.0%}" for value in (one.success, one.success_live))
    wrong = "" if one.right else " **(wrong)**"
    return (
        f"| {one.kind} | {one.state}{wrong} | {one.decided_by} | {one.served} | {one.counted} | {own} | "
        f"{beside} | {one.seconds:.0f} s | {one.reason} |"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.harmful_versions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, help="keeps adapters and results; the same one with the next run")
    parser.add_argument("--train-only", action="store_true", help="train the adapters, and stop")
    parser.add_argument("--runs", type=int, default=1, help="streams, each with its own order and seed")
    parser.add_argument("--kind", action="append", choices=KINDS, help="versions of a stream; default: all")
    parser.add_argument("--ramp", type=int, default=256, help="scored trajectories of a ramp")
    parser.add_argument("--invariant-prompts", type=int, default=64, help="0 leaves all harm to the ramp to find")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    chosen = parser.parse_args(arguments)
    signals.install_handlers()
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="harmful-versions-"))
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.absolute()
    train(folder, chosen.seed)
    if chosen.train_only:
        return 0
    runs: list[list[VersionOutcome]] = []
    for seed in range(chosen.seed, chosen.seed + chosen.runs):
        kinds = random.Random(seed).sample(chosen.kind or KINDS, len(chosen.kind or KINDS))
        stream = VersionStream(folder / f"stream-{seed}", folder / "adapters", chosen.ramp, chosen.invariant_prompts)
        runs.append(stream.run(kinds, seed, folder / f"run-{seed}.json"))
    if chosen.json:
        print(json.dumps([[asdict(one) | {"right": one.right} for one in run] for run in runs], indent=2))
    else:
        print("| version | what became of it | by | answered | scored | success | live | time | reason |")
        print("|---|---|---|---|---|---|---|---|---|")
        for one in (one for run in runs for one in sorted(run, key=lambda one: KINDS.index(one.kind))):
            print(describe(one))
    return int(not all(one.right for run in runs for one in run))


if __name__ == "__main__":
    sys.exit(main())
