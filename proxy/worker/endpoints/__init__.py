"""The ASGI endpoints for agents."""
