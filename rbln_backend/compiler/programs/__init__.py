"""Programs: captured graphs as data, their stored form and its check, and how they are run."""
