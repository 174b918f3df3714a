"""The registry of tools: admission, versions, compatibility, deprecation."""
