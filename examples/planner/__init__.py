"""A planner that delegates steps to a worker: two roles behind one base URL; only the planner is trained.

The agent speaks to any OpenAI-compatible server and sends no headers of its own: only the system prompts distinguish
the roles. This package does not import Ratchet.
"""
