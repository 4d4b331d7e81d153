"""proxy/coordinator/versions."""
