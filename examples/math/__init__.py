"""A math agent in AgentScope: task set, agent, judge and a tiny policy.

The agent speaks to any OpenAI-compatible server. This package does not import Ratchet.
"""
