"""Observability: metrics for Prometheus, progress of long phases, and monitors such as TensorBoard."""
