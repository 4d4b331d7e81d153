"""OpenAI's Agents SDK over Responses, its default, or over Chat Completions."""

from __future__ import annotations

import sys

import agents

import mailbox

agents.set_tracing_disabled(True)
if "chat" in sys.argv:
    agents.set_default_openai_api("chat_completions")


async def agent(task: mailbox.Task) -> str:
    tools = [agents.function_tool(tool) for tool in mailbox.tools(task)]
    mail = agents.Agent(name="mail", instructions=mailbox.SYSTEM, model=mailbox.MODEL, tools=list(tools))
    if not task["streamed"]:
        return str((await agents.Runner.run(mail, task["question"])).final_output)
    running = agents.Runner.run_streamed(mail, task["question"])
    async for _ in running.stream_events():
        pass
    return str(running.final_output)


if __name__ == "__main__":
    mailbox.answer(agent, "openai-agents")
