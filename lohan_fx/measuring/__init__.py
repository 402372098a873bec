"""measuring: how fast this machine is, and how long each op of a graph takes on it."""
