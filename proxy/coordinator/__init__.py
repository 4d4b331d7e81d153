"""proxy/coordinator."""
