"""Public benchmarks."""
