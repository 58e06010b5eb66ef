"""Admission by objective: requests whose first token or token pace would come too late."""
