"""Generation from a checkpoint.

cache     key/value cache with cached block summaries, as an attention engine
generate  prefill, then one token at a time
text      continues a text
"""
