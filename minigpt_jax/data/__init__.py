"""Text to batches. What a user can mend about the data is told by a `DataError`."""


class DataError(ValueError):
    """Something about the data that the user can mend; the message is one clear line."""
