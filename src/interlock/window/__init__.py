"""The context window of a model: token counts, tools within a budget, and results that fit.

Nothing here does I/O or knows a caller. `interlock.api.window` connects it with tools, calls and rights.
"""
