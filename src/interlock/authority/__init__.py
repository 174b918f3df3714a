"""Who may do what: policy and its decisions."""
