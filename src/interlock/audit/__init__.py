"""Proof afterwards: redaction, records, the chain and its verification, retention."""
