"""A NIC that several pushes share."""


class Nic:
    """It works off what it is given, one after the other, and never rests while there is something.

    What is given over a while (the layers of a pass, as they are computed) counts as work from its beginning on: the
    NIC is free for as much of it as it takes alone, whenever within that while its bytes go.
    """

    def __init__(self) -> None:
        self._idle_from_ns = 0
        self.busy_ns = 0

    def carry(self, *, start_ns: int, work_ns: int) -> int:
        """When it is through with so much work, which begins to come at `start_ns`."""
        self._idle_from_ns = max(self._idle_from_ns, start_ns) + work_ns
        self.busy_ns += work_ns
        return self._idle_from_ns
