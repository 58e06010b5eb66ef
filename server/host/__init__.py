"""Operating system helpers: watched files, run directories, tasks and worker processes."""
