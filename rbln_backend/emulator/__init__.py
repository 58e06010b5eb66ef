"""The emulated device's kernels: C++ ops built on first use, with plain PyTorch bodies behind them."""
