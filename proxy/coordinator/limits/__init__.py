"""proxy/coordinator/limits."""
