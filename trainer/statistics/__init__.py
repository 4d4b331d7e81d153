"""trainer/statistics."""
