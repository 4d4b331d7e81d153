"""proxy/coordinator/conversations."""
