"""The wiring of the gateway: its phases and what they use, built and connected in this package only.

shared ─► returning ─► executing ─► authorizing ─► gateway ─► reviewing
"""
