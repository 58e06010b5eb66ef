"""Plans, layouts, reuse and the window log."""
