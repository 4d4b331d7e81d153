"""The Berkeley Function-Calling Leaderboard, by its public package `bfcl-eval`, through the proxy.

The package pins versions that conflict with Ratchet's, so it runs in a virtual environment of its own (evaluation.py),
driven by a program there (program.py) that imports nothing of Ratchet.
"""
