"""`rbln-serve tune`: its sources, the schedule of a trace, measuring, and what it prints."""
