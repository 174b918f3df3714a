"""Endpoints: each translates one wire protocol into calls of the service, and decides nothing."""
