"""Cores, memory and files of the host."""
