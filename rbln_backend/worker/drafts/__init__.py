"""Drafts on the worker's side: proposed after a step, verified by the next."""
