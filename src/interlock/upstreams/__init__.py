"""Upstreams: systems that others run, offered as governed tools. Connectors, definitions and their repository."""
