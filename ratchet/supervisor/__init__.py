"""Start, watch and stop the services of a project: vLLM, the proxy and the trainer."""
