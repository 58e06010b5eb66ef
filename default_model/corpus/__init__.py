"""The text that the default model learns from: facts as data files, and what is made of them."""
