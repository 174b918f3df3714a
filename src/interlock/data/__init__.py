"""JSON as data: schemas, the canonical form, conversion, copying, bounds, and explanations of faults."""
