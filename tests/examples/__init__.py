"""The scripts of examples/."""
