"""Generation from a checkpoint.

load      a trained model on one device
foreign   which files a checkpoint's own recipe may make us read
cache     key/value cache with cached block summaries, as an attention engine
generate  prefill, then one token at a time
text      text in, text out
"""
