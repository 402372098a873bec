"""dump (being written)."""


def dump(model_or_plan: object) -> str:
    return ""
