"""Several ranks: the collectives of their graphs, and what they hand to each other beside them."""
