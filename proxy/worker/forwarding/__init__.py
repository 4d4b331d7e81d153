"""proxy/worker/forwarding."""
