"""`ratchet bench`: the latency that the proxy adds, measured on the user's own machine and vLLM."""
