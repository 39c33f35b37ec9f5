"""Generation from a checkpoint.

load        a trained model on one device
cache       key/value cache with cached block summaries, as an attention engine
generate    prefill, then one token at a time
"""
