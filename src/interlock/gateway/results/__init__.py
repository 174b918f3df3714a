"""Helpers of the Verify and Return phases: outputs, metadata, and the records of how calls end."""
