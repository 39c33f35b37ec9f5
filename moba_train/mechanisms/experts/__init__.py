"""A mixture of experts as the feed-forward of a layer: router, grouped products, balance, expert parallelism."""
