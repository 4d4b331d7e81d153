"""proxy/coordinator/keys."""
