"""The language models inside multimodal checkpoints, as models of their own."""
