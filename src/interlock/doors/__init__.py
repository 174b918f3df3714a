"""The doors: each translates one wire into what the service offers, and decides nothing."""
