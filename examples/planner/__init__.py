"""A planner that gives its steps to a worker: two roles behind one base URL, of which one is trained.

The agent speaks to any OpenAI-compatible server and sends no header of its own: what tells the roles apart is their
system prompt. Nothing in this package imports a room of Ratchet.
"""
