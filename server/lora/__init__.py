"""LoRA adapters: validation, registry and use counts. Independent of the engine."""
