"""The one error that is the user's to mend."""


class InputError(ValueError):
    """Something given to metabridge cannot be used; the message names it and the way out.

    The command line prints the message alone and exits with status 2.

    >>> raise InputError("ways is 7, but only 5 classes are there. Use ways=5 or fewer.")
    Traceback (most recent call last):
    metabridge.errors.InputError: ways is 7, but only 5 classes are there. Use ways=5 or fewer.
    """
