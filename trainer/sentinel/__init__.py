"""The sentinel: checks of the data that enters training and of its results. Pure checks, and one component with I/O.

A check takes records and returns findings, including healthy ones: every value is a metric. It reads no clock and no
store. Only `sentinel.py` does: it feeds the checks, raises and clears alarms, and pauses training.
"""
