"""The sentinel: is what comes in and goes out of training sound? Pure checks on frozen records, and one watcher.

A check takes records and returns findings, healthy ones included, so that every number is a metric. It reads nothing,
knows no clock and no store. `watch.py` alone does: it feeds the checks, raises and clears alarms, and holds training.
"""
