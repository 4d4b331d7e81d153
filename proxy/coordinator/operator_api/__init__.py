"""proxy/coordinator/operator_api."""
