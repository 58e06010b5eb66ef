"""LoRA adapters: fixed slots that every graph reads, filled and emptied between steps."""
