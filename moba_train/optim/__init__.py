"""AdamW over parameter groups, gradient norms and clipping, and learning-rate schedules as pure functions of the tokens
consumed."""
