"""Golden files: the answers, records, events and metrics of a corpus of calls, byte for byte.

`test_golden.py` plays the corpus and compares. After a change of behaviour that is wanted,
`python -m tests.golden` writes the files anew; the difference belongs in the same commit.
"""
