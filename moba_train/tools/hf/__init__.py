"""Published models: config.json and weights of Llama, SmolLM2, Qwen2 and Qwen3, and the first weights of a run."""
