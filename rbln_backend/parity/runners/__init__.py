"""Code that runs in a runner's process: an engine or transformers, and layer probes."""
