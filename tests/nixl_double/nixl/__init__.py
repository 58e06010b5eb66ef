"""Replaces the package nixl where it is not installed: agents of one process copy memory."""
