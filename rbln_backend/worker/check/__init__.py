"""What is told, compiled or counted of a model without an engine."""
