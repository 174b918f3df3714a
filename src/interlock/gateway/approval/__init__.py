"""Approval of calls by people: obtain it, review, grant in advance, and continue what was approved."""
