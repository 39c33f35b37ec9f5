"""Published models: config.json and weights of the families of docs/reference/models.md, and the first weights of a run."""
