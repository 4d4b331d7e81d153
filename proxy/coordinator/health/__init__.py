"""proxy/coordinator/health."""
