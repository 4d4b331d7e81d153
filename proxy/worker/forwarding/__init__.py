"""Where a captured call is sent: vLLM replicas, exact continuation, other models."""
