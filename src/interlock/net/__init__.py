"""Connections to other machines: which addresses are allowed, and the HTTP client of everything that asks over HTTP."""
