"""Chat Completions traffic of the linking campaign: what agents do that makes trajectories hard to distinguish.

Each kind is one function that sends the traffic of one agent; many run concurrently. `evidence`: the traffic contains
enough evidence to link each call, so recall is required. `alike`: all messages of its trajectories are equal, so
trajectories are scored up to permutation.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.harness.linking.traffic import AgentRun, Message, Reply, echoed, results, say, system, user

CHAT = "/v1/chat/completions"
_TASK = "Read all messages of the treasurer from {} and list every sum of money in them"
_SUM = "The messages of {} were read and the sums that were found are four and twelve"


@dataclass(frozen=True)
class TrafficKind:
    """A kind of traffic. `keys`: how many API keys its agents share; `restart`: the proxy is killed in the middle."""

    name: str
    agent: Callable[[AgentRun], Awaitable[None]]
    agents: int = 24
    evidence: bool = True
    alike: bool = False
    keys: int = 1
    restart: bool = False


async def loop(
    run: AgentRun, first: list[Message], turns: int, script: str, *, last: Reply | None = None
) -> list[Message]:
    """Continue for some turns: call, echo the answer, send results or the next question."""
    messages = list(first)
    for turn in range(turns):
        last = await run.chat(messages, last.label if last else None)
        back = echoed(last.message, run.traffic.rng)
        follow = results(last.message, f"nothing found {script}") or [user(f"turn {turn} {script}")]
        messages += [back, *follow]
        await asyncio.sleep(run.traffic.rng.random() / 100)
    return messages


async def alike_with_ids(run: AgentRun) -> None:
    """Equal prompts, equal tool calls; only the ids of the tool calls differ."""
    await loop(run, [system("Search."), user("Where is it? #tool=search")], 4, "#tool=search")


async def alike_without_ids(run: AgentRun) -> None:
    """Equal prompts, equal answers, nothing else."""
    await loop(run, [system("Talk."), user("Hello " + say("hello"))], 4, say("and hello again"))


async def rewritten_ids(run: AgentRun) -> None:
    """Equal prompts and tool calls, whose ids the agent renumbers."""
    messages = [system("Number."), user("Where is it? #tool=search")]
    before = None
    for _ in range(4):
        reply = await run.chat(messages, before)
        back = json.loads(json.dumps(reply.message))
        back["tool_calls"][0]["id"] = "call_0"
        messages += [back, *results(back, "none #tool=search")]
        before = reply.label


async def sub_agents(run: AgentRun) -> None:
    """Two sub-agents at once, with prompts of their own, each for one tool call of the parent."""
    messages = [system("Plan."), user(f"Plan {run.name}")]
    before = None
    for step in range(2):
        task = _TASK.format(f"{run.name} {step}")
        arguments = json.dumps({"task": task}, separators=(",", ":")).replace(" ", ".")
        messages[-1]["content"] += f" #tool=delegate+delegate #args={arguments}"
        reply = await run.chat(messages, before)
        await asyncio.gather(*(_sub_agent(run, f"{task}", number) for number in range(2)))
        messages += [echoed(reply.message, run.traffic.rng), *results(reply.message, f"done {step}")]
        before = reply.label
    await run.chat(messages, before)


async def _sub_agent(run: AgentRun, task: str, number: int) -> None:
    first = [system(f"You are reader {number}."), user(f"{task} #tool=search")]
    await loop(run, first, 3, "#tool=search")


async def sub_agents_by_id(run: AgentRun) -> None:
    """A sub-agent whose task is short; its prompt names the parent's tool call."""
    reply = await run.chat([user(f"Plan {run.name} #tool=delegate")])
    name = reply.message["tool_calls"][0]["id"]
    await loop(run, [system("Read."), user(f"For {name}: read it #tool=search")], 3, "#tool=search")
    await run.chat([user(f"Plan {run.name} #tool=delegate"), reply.message, *results(reply.message)], reply.label)


async def failures(run: AgentRun) -> None:
    """Now and then the upstream answers 503, and the SDK retries."""
    await loop(run, [system("Try."), user(f"Try {run.name} #tool=search")], 4, "#tool=search")


async def time_outs(run: AgentRun) -> None:
    """The client times out during the answer; the SDK sends the same request once more."""
    messages = [system("Wait."), user(f"Wait {run.name} #tokens=40 #delay=0.02")]
    before = None
    for turn in range(3):
        body = {"model": "agent", "messages": messages}
        await run.abandon(CHAT, body, before)
        await asyncio.sleep(0.15)
        reply = await run.call(CHAT, body, before, retry=1)
        messages = [*messages, reply.message, user(f"turn {turn} {run.name} #tokens=40 #delay=0.02")]
        before = reply.label


async def resends(run: AgentRun) -> None:
    """The connection breaks during the answer; the agent itself sends the call again, without a retry header."""
    messages = [system("Send."), user(f"Send {run.name} #tokens=40 #delay=0.02")]
    body = {"model": "agent", "messages": messages}
    await run.abandon(CHAT, body)
    await asyncio.sleep(0.15)
    reply = await run.call(CHAT, body)
    await run.chat([*messages, reply.message, user("on")], reply.label)


async def lost_answers(run: AgentRun) -> None:
    """An answer of a later turn is lost; the SDK retries."""
    messages = [system("Lose."), user(f"Lose {run.name}")]
    reply = await run.chat(messages)
    messages += [reply.message, user("and on")]
    body = {"model": "agent", "messages": messages}
    await run.call(CHAT, body, reply.label)
    again = await run.call(CHAT, body, reply.label, retry=1)
    await run.chat([*messages, again.message, user("more")], again.label)


async def compaction(run: AgentRun) -> None:
    """The history, as text, is summarized in a separate call; the run continues from the summary alone."""
    messages = await loop(
        run, [system("Work."), user(f"Work {run.name}")], 4, say(f"I have read the messages of part {run.name} now")
    )
    transcript = "\n".join(f"{message['role']}: {_text(message)}" for message in messages)
    summary = await run.chat([system("Sum up."), user(f"{transcript}\n\n{say(_SUM.format(run.name))}")])
    first = [system("Work."), user(f"What was done so far: {summary.message['content']}\nGo on. #tool=search")]
    await loop(run, first, 3, "#tool=search")


async def compaction_as_json(run: AgentRun) -> None:
    """The conversation itself requests the summary; the following calls contain it as JSON."""
    words = say(_SUM.format("all " + run.name))
    messages = await loop(run, [user(f"Begin {run.name} {words}")], 1, words)
    reply = await run.chat([*messages, user(f"Sum up {say(_SUM.format(run.name))}")], _before(run))
    kept = json.dumps({"summary": reply.message["content"], "by": "agent"})
    await loop(run, [system("Work."), user(f"Memory: {kept} #tool=search")], 3, "#tool=search")


async def dropped_beginning(run: AgentRun) -> None:
    """Only the last messages are kept."""
    first = [system("Window."), user(f"Window {run.name} #tool=search")]
    messages = await loop(run, first, 4, "#tool=search")
    for _ in range(3):
        reply = await run.chat([first[0], *messages[-4:]], _before(run))
        messages += [reply.message, *results(reply.message, "none #tool=search")]


async def clock_in_the_system_prompt(run: AgentRun) -> None:
    """The system prompt changes with each call."""
    messages: list[Message] = [user(f"Now {run.name} {say('I look at the mail of number ' + run.name + ' first')}")]
    before = None
    for turn in range(5):
        reply = await run.chat([system(f"It is 12:0{turn} for {run.name}."), *messages], before)
        words = say(f"then I look at the mail of number {run.name} again {turn}")
        messages += [echoed(reply.message, run.traffic.rng), user(words if turn % 2 else "#tool=search")]
        if reply.message.get("tool_calls"):
            messages[-1:] = results(reply.message, words)
        before = reply.label


async def edits(run: AgentRun) -> None:
    """An earlier question is repeated twice, and each branch continues."""
    root = [system("Edit."), user(f"Edit {run.name} #tool=search")]
    reply = await run.chat(root)
    known = [*root, reply.message]
    for number in range(3):
        messages = [*known, *results(reply.message, f"version {number} #tool=search")]
        one = await run.chat(messages, reply.label)
        await run.chat([*messages, one.message, *results(one.message)], one.label)


async def best_of_n(run: AgentRun) -> None:
    """Three answers at once; the agent continues two of them concurrently."""
    root = [user(f"Choose {run.name}")]
    reply = await run.chat(root, n=3)
    await asyncio.gather(*(_branch(run, root, reply, choice) for choice in (2, 0)))


async def _branch(run: AgentRun, root: list[Message], reply: Reply, choice: int) -> None:
    messages = [*root, reply.messages[choice], user("go on")]
    body = {"model": "agent", "messages": messages}
    one = await run.call(CHAT, body, reply.label, choice)
    await run.chat([*messages, one.message, user("end")], one.label)


async def best_of_n_alike(run: AgentRun) -> None:
    """Every agent has the same prompt and three equal tool calls to choose from; the ids differ."""
    root = [system("Best."), user("Choose #tool=search")]
    reply = await run.chat(root, n=3)
    picked = run.traffic.rng.randrange(3)
    body = {"model": "agent", "messages": [*root, reply.messages[picked], *results(reply.messages[picked])]}
    await run.call(CHAT, body, reply.label, picked)


async def several_answers_alike(run: AgentRun) -> None:
    """Equal prompts and four equal answers to each, without ids; every agent continues the first."""
    messages = [system("Four."), user("Hello " + say("hello"))]
    before = None
    for _ in range(4):
        reply = await run.chat(messages, before, n=4)
        messages += [echoed(reply.message, run.traffic.rng), user(say("and hello again"))]
        before = reply.label
        await asyncio.sleep(run.traffic.rng.random() / 100)


async def reminders(run: AgentRun) -> None:
    """The last message of each prompt states the time and is absent from the next."""
    messages = [system("Remind."), user(f"Remember {run.name}")]
    before = None
    for turn in range(4):
        reply = await run.chat([*messages, user(f"It is 12:0{turn} {say('ok')}")], before)
        messages += [echoed(reply.message, run.traffic.rng), user(f"turn {turn}")]
        before = reply.label


async def calls_as_text(run: AgentRun) -> None:
    """Tool calls and results are sent back as text."""
    messages = [user(f"Text {run.name} #tool=search")]
    before = None
    for turn in range(4):
        reply = await run.chat(messages, before)
        calls = [
            {"id": call["id"], "type": "function", "function": call["function"]} for call in reply.message["tool_calls"]
        ]
        back = {"role": "assistant", "content": [{"type": "text", "text": f"Calling tools:\n{calls}"}]}
        messages += [back, user(f"Observation:\n{turn} #tool=search")]
        before = reply.label


async def history_as_text(run: AgentRun) -> None:
    """Each prompt is one text that contains all earlier answers."""
    text = f"Question {run.name}\n"
    for turn in range(4):
        reply = await run.chat([user(f"{text}{say(f'I think of number {run.name} and of its step {turn} next')}")])
        text += f"Thought: {reply.message['content']}\nObservation: {turn}\n"


async def cut_answers(run: AgentRun) -> None:
    """Every agent gets the same long answer to its own task, and echoes it with the tag that a stop string cut off."""
    messages = [system("Code."), user(f"Task {run.name}")]
    before = None
    for turn in range(4):
        messages[-1]["content"] += " " + say(f"I write the code of step {turn} and print what it gives")
        reply = await run.chat(messages, before)
        messages += [
            {"role": "assistant", "content": reply.message["content"] + "\n</code>"},
            user(f"Observation {turn}"),
        ]
        before = reply.label


async def added_fields(run: AgentRun) -> None:
    """Reasoning kept or dropped, fields added, content in every format, arguments reformatted."""
    script = "#tool=search #think=let.me.see"
    await loop(run, [system("Echo."), user(f"Echo {run.name} {script}")], 6, script)


async def keys_alike(run: AgentRun) -> None:
    """Equal prompts and answers under different keys."""
    await loop(run, [system("Keys."), user("Hello " + say("hello"))], 3, say("and hello again"))


# --- no evidence: nothing may be merged, and recall is not required ------------------------------------------


async def reworded_tasks(run: AgentRun) -> None:
    """A sub-agent's task has other words than the parent's tool call."""
    reply = await run.chat([user(f"Reword {run.name} #tool=delegate")])
    await loop(run, [system("Read."), user(f"Please do {run.name} #tool=search")], 2, "#tool=search")
    await run.chat([user(f"Reword {run.name} #tool=delegate"), reply.message, *results(reply.message)], reply.label)


async def lost_first_answers(run: AgentRun) -> None:
    """The first answer of a run is lost; the SDK retries, and another run of the same prompt may retry too."""
    root = [user(f"First {run.name}")]
    body = {"model": "agent", "messages": root}
    await run.call(CHAT, body)
    reply = await run.call(CHAT, body, retry=1)
    await run.chat([*root, reply.message, user("on")], reply.label)


async def attempts_that_repeat_the_task(run: AgentRun) -> None:
    """Attempts at one task, started one after the other; each calls a tool with the task's own words."""
    await asyncio.sleep(run.traffic.rng.random() / 4)
    task = _TASK.format("this year")
    arguments = json.dumps({"q": task}, separators=(",", ":")).replace(" ", ".")
    await loop(run, [system(f"Clock {run.name}."), user(f"{task} #tool=search #args={arguments}")], 3, "#tool=search")


async def words_of_others(run: AgentRun) -> None:
    """An agent with a history from elsewhere that starts with an answer to another agent."""
    words = f"I write the code of {run.name} and print what it gives"
    await run.chat([system("Code."), user(f"Task {run.name} {say(words)}")])
    other = run.traffic.run(run.kind, f"{run.name}.other")
    history = [user(f"Another task {run.name}"), {"role": "assistant", "content": words + "\n</code>"}]
    await other.chat([system("Code."), *history, user(f"Observation #tool=search {run.name}")])


async def judges(run: AgentRun) -> None:
    """Two runs and a judge that sees both: three trajectories."""
    words = [f"The answer of {run.name} to question {number} is forty and two" for number in range(2)]
    for number in range(2):
        one = run.traffic.run(run.kind, f"{run.name}.{number}")
        await one.chat([user(f"Answer {run.name} {number} {say(words[number])}")])
    judge = run.traffic.run(run.kind, f"{run.name}.judge")
    await judge.chat([system("Judge."), user(f"First:\n{words[0]}\nSecond:\n{words[1]}\nWhich?")])


def _before(run: AgentRun) -> str:
    """Return the label of the run's last call."""
    return next(
        truth.label for truth in reversed(run.traffic.truths) if (truth.kind, truth.run) == (run.kind, run.name)
    )


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


KINDS = (
    TrafficKind("alike, tool-call ids", alike_with_ids, 64),
    TrafficKind("alike, no ids", alike_without_ids, 64, alike=True),
    TrafficKind("alike, ids rewritten", rewritten_ids, 64, alike=True),
    TrafficKind("alike under 8 keys", keys_alike, 64, alike=True, keys=8),
    TrafficKind("sub-agents, task quoted", sub_agents),
    TrafficKind("sub-agents, id quoted", sub_agents_by_id),
    TrafficKind("503 and SDK retries", failures),
    TrafficKind("time-outs and retries", time_outs),
    TrafficKind("resends after a break", resends),
    TrafficKind("later answers lost", lost_answers),
    TrafficKind("compaction", compaction),
    TrafficKind("compaction, JSON", compaction_as_json),
    TrafficKind("beginning dropped", dropped_beginning),
    TrafficKind("clock in system prompt", clock_in_the_system_prompt),
    TrafficKind("edits of earlier turns", edits),
    TrafficKind("best of n", best_of_n),
    TrafficKind("best of n, alike", best_of_n_alike, 64),
    TrafficKind("n=4, alike, no ids", several_answers_alike, alike=True),
    TrafficKind("reminders", reminders),
    TrafficKind("tool calls as text", calls_as_text),
    TrafficKind("history as text", history_as_text),
    TrafficKind("answers cut by a stop", cut_answers),
    TrafficKind("fields added, dropped", added_fields),
    TrafficKind("restart: tool-call ids", alike_with_ids, 64, restart=True),
    TrafficKind("restart: alike, no ids", alike_without_ids, 64, alike=True, restart=True),
    TrafficKind("restart: n=4, alike", several_answers_alike, alike=True, restart=True),
    TrafficKind("restart: compaction", compaction, restart=True),
    TrafficKind("restart: clock", clock_in_the_system_prompt, restart=True),
    TrafficKind("tasks reworded", reworded_tasks, evidence=False),
    TrafficKind("words of others", words_of_others, evidence=False),
    TrafficKind("first answers lost", lost_first_answers, evidence=False),
    TrafficKind("task repeated by tools", attempts_that_repeat_the_task),
    TrafficKind("judges of two runs", judges),
)
