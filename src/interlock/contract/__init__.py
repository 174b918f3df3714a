"""The promises of a tool: contract, manifest, versions, effects and permissions. `standard` has Agent Tool 0.2.0."""
