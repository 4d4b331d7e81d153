"""trainer/observability."""
