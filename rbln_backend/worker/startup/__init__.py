"""From a configuration to a worker that is ready, before and after the weights."""
