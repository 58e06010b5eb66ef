"""Shared parts of commands: arguments, records, results and the machine."""
