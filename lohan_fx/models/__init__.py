"""models: architectures by their dimensions: presets, Hugging Face configs, counts."""
