"""vLLM's front end behind our port: the only importer of vllm.entrypoints."""
