"""Steps that the device runs while the engine plans the next one (``--async-scheduling``)."""
