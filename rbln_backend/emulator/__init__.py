"""The emulated device's kernels: C++ ops built on first use, PyTorch bodies behind them."""
