"""proxy/coordinator/tool_checks."""
