"""Reports of the engine: progress, metrics, ranks, descriptions, and the results of `check`."""
