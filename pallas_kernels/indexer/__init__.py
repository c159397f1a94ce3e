"""The lightning indexer with a fused exact top-k."""
