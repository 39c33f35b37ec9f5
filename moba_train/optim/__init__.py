"""AdamW over parameter groups, and learning-rate schedules as pure functions of the tokens consumed."""
