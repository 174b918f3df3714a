"""Systems that others run, made into governed tools: connectors, definitions and the book kept of them."""
