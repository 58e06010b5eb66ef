"""The audit log's side of the engine: records of its answers, and their replay."""
