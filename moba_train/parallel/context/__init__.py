"""Context parallelism: one packed sequence sharded over several ranks, for any attention."""
