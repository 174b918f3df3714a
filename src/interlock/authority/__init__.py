"""Authority: identities, tokens, policy and its decisions, credentials, budgets."""
