"""Other people's programs running on our attention. Imports of theirs stay inside the functions that need them.

transformers  `attn_implementation="moba"`
"""
