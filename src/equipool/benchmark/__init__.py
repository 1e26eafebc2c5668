"""Methods compared on held-out participants: the paper's Table 1, harmonizers, harmonized images."""
