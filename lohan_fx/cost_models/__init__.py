"""Seconds of a training step by formula, one file per system, each with its equations cited.

``formula.CostModel`` says what a model can do: be evaluated, printed, differentiated, and tell which term binds.
"""
