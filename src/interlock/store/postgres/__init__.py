"""The store on PostgreSQL: its dialect, connections, schema, leases and data directories."""
