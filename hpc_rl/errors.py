"""The errors that a user can cause, told in one line: the value, the rule, the fix."""


class UserError(ValueError):
    """A wrong input. The command line prints its message alone and exits with code 2."""


class RunError(RuntimeError):
    """A run that must stop (a NaN loss, a failed reward, a dead rank). Exit code 1, message first."""


class NotFiniteError(RunError):
    """A loss, a gradient or a reward that is no finite number: the same again after a restart."""
