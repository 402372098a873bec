"""parameters: where a model's parameters come from, and what stands in the model for those in the store."""
