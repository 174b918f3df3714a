"""Everything that can be asked of an Interlock, for programs, endpoints and the command line.

interlock       the library facade: one open data directory, and what a program does with it
opening         how a data directory is opened; backends, background, home_health, scratch: its parts
service         the same operations for authenticated callers, as endpoints offer them
rights          what a caller needs to be allowed to ask
calls, tools, approvals, audit, budgets, policy, tokens, upstreams, …: one module per subject
"""
