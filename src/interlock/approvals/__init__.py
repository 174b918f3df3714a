"""People decide: tickets, escalation, standing approvals, and telling whoever must decide."""
