"""proxy/worker."""
