"""Connections to vLLM and other model servers: HTTP client, replica pools, probes, circuit breakers."""
