"""The health endpoints."""
