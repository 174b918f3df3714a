"""Chooses tools for a request, in stages. Each stage works without the others, and none of them permits a call."""
