"""Human approval: tickets, escalation, standing approvals, and notification of approvers."""
