"""Evidence: verification of the journal's chain, exports, retention, and views of what happened."""
