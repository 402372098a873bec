"""reporting: plans, graphs and trainings as text, pictures and data, for people."""
