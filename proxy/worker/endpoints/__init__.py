"""proxy/worker/endpoints."""
