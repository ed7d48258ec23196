"""The one exception that means "the user made a mistake"."""


class UserError(Exception):
    """Say in one sentence what is wrong, with the value, what is allowed, and where.

    The command line prints the sentence and exits with status 2; any other exception is a
    defect of ours and keeps its traceback.
    """
