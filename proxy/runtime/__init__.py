"""proxy/runtime."""
