"""What goes wrong for a person to mend: every message says what, where, with numbers, and a way out."""


class ShardingError(ValueError):
    """A step, pin or budget for which no plan exists."""


class PlanFileError(ValueError):
    """A plan file that is damaged, foreign, or for another mesh or model."""


class ShardingWarning(UserWarning):
    """Something that works, but less well than a person may think."""
