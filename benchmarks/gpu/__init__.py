"""One visit to a machine with a GPU: what is sent there, what is measured there (benchmarks/gpu/README.md)."""
