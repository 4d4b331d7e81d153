"""The HTTP APIs for agents. Each parses its requests and encodes its responses, around one inner call to vLLM."""
