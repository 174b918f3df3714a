"""The tools there are: admission, versions, compatibility, deprecation."""
