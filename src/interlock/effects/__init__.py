"""Effects of tools: resource locks, session state, and watchers that detect changes to files and databases."""
