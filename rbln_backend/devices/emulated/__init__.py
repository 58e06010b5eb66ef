"""The emulated device: graphs on this host's CPU, over C++ ops or their PyTorch bodies."""
