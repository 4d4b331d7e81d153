"""The Python API: what `import ratchet` offers. The command line calls it."""
