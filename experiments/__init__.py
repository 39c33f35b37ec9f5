"""The claims about MoBA in miniature: one program trains the arms of a figure, draws it and says what it shows."""
