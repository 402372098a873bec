"""checkpoints: what a training needs to go on, gathered, committed and taken up again."""
