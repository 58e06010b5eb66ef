"""GGUF, llama.cpp's file format, written out as a checkpoint that vLLM's own code loads.

transformers parses the file, expands its blocks and builds its tokenizer
(`transformers.integrations.gguf`). Its own loader reads what it knows of a configuration and
leaves the rest; here every key and every tensor has to have a meaning, or the file is refused.
"""
