"""Published models: config.json and weights of each family, and the first weights of a run."""
