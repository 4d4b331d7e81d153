"""The tested clients by name, with their particularities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.harness.clients.program import Program
from tests.harness.clients.scenario import CODE, FINAL_TOOL, LOOP, Scenario


@dataclass(frozen=True)
class Client:
    """A client: its program, its dialect, its streaming modes, and the properties of its calls.

    `linked_by` is the evidence that links its calls. `contexts` are those of its calls in the store; a client that
    changes the history causes forks.
    """

    name: str
    program: Program
    dialect: str = "chat"
    modes: tuple[bool, ...] = (False, True)
    linked_by: tuple[str, ...] = ("graph", "graph+tool_ids")
    contexts: tuple[str, ...] = ("root", "exact", "exact", "exact")
    scenario: Scenario = LOOP

    def marker(self, streamed: bool) -> str:
        """A marker that is unique to this run's question."""
        return f"[{self.name} {'streamed' if streamed else 'whole'}]"


def _client(name: str, environment: str, script: str, *arguments: str, **more: Any) -> Client:
    return Client(name, Program(name, environment, script, arguments), **more)


RESPONSE_ID = ("previous_response",)  # `previous_response_id`, as in the SDK's documentation

# The history is sent as text with the tool calls' ids or the answers' words, so each context is new.
AS_TEXT: dict[str, Any] = {"linked_by": ("tool_ids",), "contexts": ("root", "fork", "fork", "fork")}
AS_CODE: dict[str, Any] = {"linked_by": ("quote",), "contexts": ("root", "fork", "fork")}

CLIENTS = (
    _client("openai2", "openai2", "openai_chat.py"),
    _client("openai3", "openai3", "openai_chat.py"),
    _client("openai2-azure", "openai2", "openai_chat.py", "azure"),
    _client("openai3-azure", "openai3", "openai_chat.py", "azure"),
    _client("openai-npm", "node", "openai_chat.js"),
    _client("openai2-responses", "openai2", "openai_responses.py", dialect="responses", linked_by=RESPONSE_ID),
    _client("openai3-responses", "openai3", "openai_responses.py", dialect="responses", linked_by=RESPONSE_ID),
    _client("anthropic", "openai3", "anthropic_messages.py", dialect="messages"),
    _client("openai-agents", "openai3", "openai_agents.py", dialect="responses"),
    _client("openai-agents-chat", "openai3", "openai_agents.py", "chat"),
    _client("langgraph", "openai3", "langgraph_agent.py"),
    _client("langchain", "openai3", "langchain_agent.py"),
    _client("pydantic-ai", "openai3", "pydantic_ai_agent.py"),
    _client("litellm-hosted_vllm", "openai2", "litellm_chat.py", "hosted_vllm"),
    _client("litellm-openai", "openai2", "litellm_chat.py", "openai"),
    _client("ai-sdk", "node", "ai_sdk.js"),
    _client("agentscope", "openai3", "agentscope_react.py"),
    _client("haystack", "openai3", "haystack_agent.py"),
    _client("autogen", "openai3", "autogen_agent.py"),
    _client("llama-index", "openai2", "llama_index_agent.py"),
    _client("strands", "openai2", "strands_agent.py", modes=(True,)),
    _client("smolagents-tools", "openai3", "smolagents_agent.py", "tools", scenario=FINAL_TOOL, **AS_TEXT),
    # One mode only: equal answers to different questions cannot be distinguished by their text.
    _client("smolagents-code", "openai3", "smolagents_agent.py", "code", scenario=CODE, modes=(False,), **AS_CODE),
)
