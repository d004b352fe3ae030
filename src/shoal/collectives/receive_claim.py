"""Of a receive from any rank that waits in several places, one takes the message."""


class ReceiveClaim:
    """Of a receive that waits in several places: the first that takes the claim has the message."""

    def __init__(self) -> None:
        self._ticket = [True]

    def take(self) -> bool:
        try:
            return self._ticket.pop()  # atomic
        except IndexError:
            return False
