"""LoRA adapters: which are loaded, who uses them, what may be loaded. Knows no engine."""
