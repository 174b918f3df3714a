"""Contracts, schemas, phases, states, results, errors and events: pure, no I/O."""
