"""Drafts on the worker's side: asked for after a step, judged by the next."""
