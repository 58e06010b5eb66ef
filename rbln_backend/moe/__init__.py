"""Mixtures of experts: who chooses, which op computes, what a rank holds of them."""
