"""Processes of a run: identity, signals, supervised and confined children, their requests."""
