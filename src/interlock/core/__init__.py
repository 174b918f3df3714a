"""Errors, clock, ids and small helpers that every other package stands on: pure, no I/O."""
