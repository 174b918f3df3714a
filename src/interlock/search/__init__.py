"""Search in a catalog of tools."""
