"""The kinds of Chat Completions traffic of the linking benchmark: what agents do that makes runs hard to tell apart.

Each kind is one function that sends the traffic of one agent; the benchmark runs many of them at once. `evidence`:
whether the traffic says where each call belongs, so that recall can be asked for; `alike`: whether its runs are equal
in every message, so that the truth is meant up to their permutation.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.linking_traffic import Message, Run, Said, echoed, results, say, system, user

CHAT = "/v1/chat/completions"
_TASK = "Read all messages of the treasurer from {} and list every sum of money in them"
_SUM = "The messages of {} were read and the sums that were found are four and twelve"


@dataclass(frozen=True)
class Kind:
    """A kind of traffic. `keys`: how many API keys its agents share; `restart`: the proxy is killed in the middle."""

    name: str
    agent: Callable[[Run], Awaitable[None]]
    agents: int = 24
    evidence: bool = True
    alike: bool = False
    keys: int = 1
    restart: bool = False


async def loop(run: Run, first: list[Message], turns: int, script: str, *, last: Said | None = None) -> list[Message]:
    """Go on for some turns: ask, echo, send results or the next question."""
    messages = list(first)
    for turn in range(turns):
        last = await run.chat(messages, last.label if last else None)
        back = echoed(last.message, run.traffic.rng)
        follow = results(last.message, f"nothing found {script}") or [user(f"turn {turn} {script}")]
        messages += [back, *follow]
        await asyncio.sleep(run.traffic.rng.random() / 100)
    return messages


async def alike_with_ids(run: Run) -> None:
    """Equal prompts, equal tool calls; only the ids of the tool calls differ."""
    await loop(run, [system("Search."), user("Where is it? #tool=search")], 4, "#tool=search")


async def alike_without_ids(run: Run) -> None:
    """Equal prompts, equal answers, nothing else."""
    await loop(run, [system("Talk."), user("Hello " + say("hello"))], 4, say("and hello again"))


async def rewritten_ids(run: Run) -> None:
    """Equal prompts and tool calls, whose ids the agent numbers anew."""
    messages = [system("Number."), user("Where is it? #tool=search")]
    before = None
    for _ in range(4):
        said = await run.chat(messages, before)
        back = json.loads(json.dumps(said.message))
        back["tool_calls"][0]["id"] = "call_0"
        messages += [back, *results(back, "none #tool=search")]
        before = said.label


async def sub_agents(run: Run) -> None:
    """Two sub-agents at once, with prompts of their own, each for one tool call of the parent."""
    messages = [system("Plan."), user(f"Plan {run.name}")]
    before = None
    for step in range(2):
        task = _TASK.format(f"{run.name} {step}")
        arguments = json.dumps({"task": task}, separators=(",", ":")).replace(" ", ".")
        messages[-1]["content"] += f" #tool=delegate+delegate #args={arguments}"
        said = await run.chat(messages, before)
        await asyncio.gather(*(_sub_agent(run, f"{task}", number) for number in range(2)))
        messages += [echoed(said.message, run.traffic.rng), *results(said.message, f"done {step}")]
        before = said.label
    await run.chat(messages, before)


async def _sub_agent(run: Run, task: str, number: int) -> None:
    first = [system(f"You are reader {number}."), user(f"{task} #tool=search")]
    await loop(run, first, 3, "#tool=search")


async def sub_agents_by_id(run: Run) -> None:
    """A sub-agent whose task is short; its prompt names the parent's tool call."""
    said = await run.chat([user(f"Plan {run.name} #tool=delegate")])
    name = said.message["tool_calls"][0]["id"]
    await loop(run, [system("Read."), user(f"For {name}: read it #tool=search")], 3, "#tool=search")
    await run.chat([user(f"Plan {run.name} #tool=delegate"), said.message, *results(said.message)], said.label)


async def failures(run: Run) -> None:
    """Now and then the upstream answers 503, and the SDK tries again."""
    await loop(run, [system("Try."), user(f"Try {run.name} #tool=search")], 4, "#tool=search")


async def time_outs(run: Run) -> None:
    """The client's patience ends while the answer is made; the SDK sends the same once more."""
    messages = [system("Wait."), user(f"Wait {run.name} #tokens=40 #delay=0.02")]
    before = None
    for turn in range(3):
        body = {"model": "agent", "messages": messages}
        await run.leave(CHAT, body, before)
        await asyncio.sleep(0.15)
        said = await run.ask(CHAT, body, before, retry=1)
        messages = [*messages, said.message, user(f"turn {turn} {run.name} #tokens=40 #delay=0.02")]
        before = said.label


async def resends(run: Run) -> None:
    """The connection breaks while the answer is made; the agent itself asks again, without a word about it."""
    messages = [system("Send."), user(f"Send {run.name} #tokens=40 #delay=0.02")]
    body = {"model": "agent", "messages": messages}
    await run.leave(CHAT, body)
    await asyncio.sleep(0.15)
    said = await run.ask(CHAT, body)
    await run.chat([*messages, said.message, user("on")], said.label)


async def lost_answers(run: Run) -> None:
    """An answer of a later turn is lost on the way; the SDK tries again."""
    messages = [system("Lose."), user(f"Lose {run.name}")]
    said = await run.chat(messages)
    messages += [said.message, user("and on")]
    body = {"model": "agent", "messages": messages}
    await run.ask(CHAT, body, said.label)
    again = await run.ask(CHAT, body, said.label, retry=1)
    await run.chat([*messages, again.message, user("more")], again.label)


async def compaction(run: Run) -> None:
    """The history, written as text, is summed up in a call of its own; the run goes on from the summary alone."""
    messages = await loop(
        run, [system("Work."), user(f"Work {run.name}")], 4, say(f"I have read the messages of part {run.name} now")
    )
    told = "\n".join(f"{message['role']}: {_text(message)}" for message in messages)
    summary = await run.chat([system("Sum up."), user(f"{told}\n\n{say(_SUM.format(run.name))}")])
    first = [system("Work."), user(f"What was done so far: {summary.message['content']}\nGo on. #tool=search")]
    await loop(run, first, 3, "#tool=search")


async def compaction_as_json(run: Run) -> None:
    """The summary is asked for in the conversation itself; what follows holds it as JSON."""
    words = say(_SUM.format("all " + run.name))
    messages = await loop(run, [user(f"Begin {run.name} {words}")], 1, words)
    said = await run.chat([*messages, user(f"Sum up {say(_SUM.format(run.name))}")], _before(run))
    kept = json.dumps({"summary": said.message["content"], "by": "agent"})
    await loop(run, [system("Work."), user(f"Memory: {kept} #tool=search")], 3, "#tool=search")


async def dropped_beginning(run: Run) -> None:
    """Only the last messages are kept."""
    first = [system("Window."), user(f"Window {run.name} #tool=search")]
    messages = await loop(run, first, 4, "#tool=search")
    for _ in range(3):
        said = await run.chat([first[0], *messages[-4:]], _before(run))
        messages += [said.message, *results(said.message, "none #tool=search")]


async def clock_in_the_system_prompt(run: Run) -> None:
    """The system prompt changes with each call."""
    messages: list[Message] = [user(f"Now {run.name} {say('I look at the mail of number ' + run.name + ' first')}")]
    before = None
    for turn in range(5):
        said = await run.chat([system(f"It is 12:0{turn} for {run.name}."), *messages], before)
        words = say(f"then I look at the mail of number {run.name} again {turn}")
        messages += [echoed(said.message, run.traffic.rng), user(words if turn % 2 else "#tool=search")]
        if said.message.get("tool_calls"):
            messages[-1:] = results(said.message, words)
        before = said.label


async def edits(run: Run) -> None:
    """An earlier question is asked anew, twice, and each branch goes on."""
    root = [system("Edit."), user(f"Edit {run.name} #tool=search")]
    said = await run.chat(root)
    known = [*root, said.message]
    for number in range(3):
        messages = [*known, *results(said.message, f"version {number} #tool=search")]
        one = await run.chat(messages, said.label)
        await run.chat([*messages, one.message, *results(one.message)], one.label)


async def best_of_n(run: Run) -> None:
    """Three answers at once; the agent goes on with two of them at the same time."""
    root = [user(f"Choose {run.name}")]
    said = await run.chat(root, n=3)
    await asyncio.gather(*(_branch(run, root, said, choice) for choice in (2, 0)))


async def _branch(run: Run, root: list[Message], said: Said, choice: int) -> None:
    messages = [*root, said.messages[choice], user("go on")]
    body = {"model": "agent", "messages": messages}
    one = await run.ask(CHAT, body, said.label, choice)
    await run.chat([*messages, one.message, user("end")], one.label)


async def best_of_n_alike(run: Run) -> None:
    """Every agent has the same prompt and three equal tool calls to choose from; the ids differ."""
    root = [system("Best."), user("Choose #tool=search")]
    said = await run.chat(root, n=3)
    picked = run.traffic.rng.randrange(3)
    body = {"model": "agent", "messages": [*root, said.messages[picked], *results(said.messages[picked])]}
    await run.ask(CHAT, body, said.label, picked)


async def several_answers_alike(run: Run) -> None:
    """Equal prompts and four equal answers to each, without ids; every agent goes on with the first."""
    messages = [system("Four."), user("Hello " + say("hello"))]
    before = None
    for _ in range(4):
        said = await run.chat(messages, before, n=4)
        messages += [echoed(said.message, run.traffic.rng), user(say("and hello again"))]
        before = said.label
        await asyncio.sleep(run.traffic.rng.random() / 100)


async def reminders(run: Run) -> None:
    """The last message of each prompt tells the time and is gone in the next."""
    messages = [system("Remind."), user(f"Remember {run.name}")]
    before = None
    for turn in range(4):
        said = await run.chat([*messages, user(f"It is 12:0{turn} {say('ok')}")], before)
        messages += [echoed(said.message, run.traffic.rng), user(f"turn {turn}")]
        before = said.label


async def calls_as_text(run: Run) -> None:
    """Tool calls and results come back as text."""
    messages = [user(f"Text {run.name} #tool=search")]
    before = None
    for turn in range(4):
        said = await run.chat(messages, before)
        calls = [
            {"id": call["id"], "type": "function", "function": call["function"]} for call in said.message["tool_calls"]
        ]
        back = {"role": "assistant", "content": [{"type": "text", "text": f"Calling tools:\n{calls}"}]}
        messages += [back, user(f"Observation:\n{turn} #tool=search")]
        before = said.label


async def history_as_text(run: Run) -> None:
    """Each prompt is one text that holds all answers so far."""
    text = f"Question {run.name}\n"
    for turn in range(4):
        said = await run.chat([user(f"{text}{say(f'I think of number {run.name} and of its step {turn} next')}")])
        text += f"Thought: {said.message['content']}\nObservation: {turn}\n"


async def cut_answers(run: Run) -> None:
    """Every agent says the same long words, for a task of its own; they come back with the tag that a stop cut off."""
    messages = [system("Code."), user(f"Task {run.name}")]
    before = None
    for turn in range(4):
        messages[-1]["content"] += " " + say(f"I write the code of step {turn} and print what it gives")
        said = await run.chat(messages, before)
        messages += [
            {"role": "assistant", "content": said.message["content"] + "\n</code>"},
            user(f"Observation {turn}"),
        ]
        before = said.label


async def added_fields(run: Run) -> None:
    """Thoughts kept or dropped, fields added, content in every form, arguments written anew."""
    script = "#tool=search #think=let.me.see"
    await loop(run, [system("Echo."), user(f"Echo {run.name} {script}")], 6, script)


async def keys_alike(run: Run) -> None:
    """Equal prompts and answers under different keys."""
    await loop(run, [system("Keys."), user("Hello " + say("hello"))], 3, say("and hello again"))


# --- no evidence: nothing may be merged, and nothing more is asked for ------------------------------------------


async def reworded_tasks(run: Run) -> None:
    """A sub-agent's task is told in other words than the parent's tool call had."""
    said = await run.chat([user(f"Reword {run.name} #tool=delegate")])
    await loop(run, [system("Read."), user(f"Please do {run.name} #tool=search")], 2, "#tool=search")
    await run.chat([user(f"Reword {run.name} #tool=delegate"), said.message, *results(said.message)], said.label)


async def lost_first_answers(run: Run) -> None:
    """The first answer of a run is lost on the way; the SDK tries again, and so may another run of the same prompt."""
    root = [user(f"First {run.name}")]
    body = {"model": "agent", "messages": root}
    await run.ask(CHAT, body)
    said = await run.ask(CHAT, body, retry=1)
    await run.chat([*root, said.message, user("on")], said.label)


async def attempts_that_repeat_the_task(run: Run) -> None:
    """Attempts at one task, begun one after the other; each calls a tool with the task's own words."""
    await asyncio.sleep(run.traffic.rng.random() / 4)
    task = _TASK.format("this year")
    arguments = json.dumps({"q": task}, separators=(",", ":")).replace(" ", ".")
    await loop(run, [system(f"Clock {run.name}."), user(f"{task} #tool=search #args={arguments}")], 3, "#tool=search")


async def words_of_others(run: Run) -> None:
    """An agent whose history was made elsewhere: it begins with words that we have said to another."""
    words = f"I write the code of {run.name} and print what it gives"
    await run.chat([system("Code."), user(f"Task {run.name} {say(words)}")])
    other = run.traffic.run(run.kind, f"{run.name}.other")
    history = [user(f"Another task {run.name}"), {"role": "assistant", "content": words + "\n</code>"}]
    await other.chat([system("Code."), *history, user(f"Observation #tool=search {run.name}")])


async def judges(run: Run) -> None:
    """Two runs, and a judge that is shown both: three trajectories."""
    words = [f"The answer of {run.name} to question {number} is forty and two" for number in range(2)]
    for number in range(2):
        one = run.traffic.run(run.kind, f"{run.name}.{number}")
        await one.chat([user(f"Answer {run.name} {number} {say(words[number])}")])
    judge = run.traffic.run(run.kind, f"{run.name}.judge")
    await judge.chat([system("Judge."), user(f"First:\n{words[0]}\nSecond:\n{words[1]}\nWhich?")])


def _before(run: Run) -> str:
    """Return the label of the run's last call."""
    return next(
        truth.label for truth in reversed(run.traffic.truths) if (truth.kind, truth.run) == (run.kind, run.name)
    )


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


KINDS = (
    Kind("alike, tool-call ids", alike_with_ids, 64),
    Kind("alike, no ids", alike_without_ids, 64, alike=True),
    Kind("alike, ids rewritten", rewritten_ids, 64, alike=True),
    Kind("alike under 8 keys", keys_alike, 64, alike=True, keys=8),
    Kind("sub-agents, task quoted", sub_agents),
    Kind("sub-agents, id quoted", sub_agents_by_id),
    Kind("503 and SDK retries", failures),
    Kind("time-outs and retries", time_outs),
    Kind("resends after a break", resends),
    Kind("later answers lost", lost_answers),
    Kind("compaction", compaction),
    Kind("compaction, JSON", compaction_as_json),
    Kind("beginning dropped", dropped_beginning),
    Kind("clock in system prompt", clock_in_the_system_prompt),
    Kind("edits of earlier turns", edits),
    Kind("best of n", best_of_n),
    Kind("best of n, alike", best_of_n_alike, 64),
    Kind("n=4, alike, no ids", several_answers_alike, alike=True),
    Kind("reminders", reminders),
    Kind("tool calls as text", calls_as_text),
    Kind("history as text", history_as_text),
    Kind("answers cut by a stop", cut_answers),
    Kind("fields added, dropped", added_fields),
    Kind("restart: tool-call ids", alike_with_ids, 64, restart=True),
    Kind("restart: alike, no ids", alike_without_ids, 64, alike=True, restart=True),
    Kind("restart: n=4, alike", several_answers_alike, alike=True, restart=True),
    Kind("restart: compaction", compaction, restart=True),
    Kind("restart: clock", clock_in_the_system_prompt, restart=True),
    Kind("tasks reworded", reworded_tasks, evidence=False),
    Kind("words of others", words_of_others, evidence=False),
    Kind("first answers lost", lost_first_answers, evidence=False),
    Kind("task repeated by tools", attempts_that_repeat_the_task),
    Kind("judges of two runs", judges),
)
