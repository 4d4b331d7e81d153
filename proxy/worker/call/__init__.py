"""proxy/worker/call."""
