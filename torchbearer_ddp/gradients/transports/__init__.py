"""How a bucket is summed over the ranks: one file per transport."""
