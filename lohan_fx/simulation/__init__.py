"""simulation: one training step by events, from the scheduled nodes of the rewritten graphs; mirrors the runtime."""
