"""Generation from a checkpoint.

cache     key/value cache with cached block summaries, as an attention engine
generate  prefill, then one token at a time
prompt    reads the prompt of a command, and says how far the model has read it
text      continues a text
"""
