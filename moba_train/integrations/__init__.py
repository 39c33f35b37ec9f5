"""Our attention inside other libraries, which are imported only in the functions that need them.

transformers  `attn_implementation="moba"`
"""
