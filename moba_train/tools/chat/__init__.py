"""Chat templates: conversations as text and tokens."""
