"""Helpers of the Execute phase: keys, locks, credentials, contexts, running and stopping tools."""
