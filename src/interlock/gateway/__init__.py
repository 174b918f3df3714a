"""The governed call: Request, Validate, Authorize, Execute, Verify, Return."""
