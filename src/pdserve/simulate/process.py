"""A process of the world: it lives, may stand still, and ends; nothing happens to it while it does not run."""

from pdserve.simulate.agenda import Action, Agenda


class Process:
    """Everything that happens to a process goes through `do` or `after`."""

    def __init__(self, agenda: Agenda, name: str) -> None:
        self.name = name
        """Its address; a successor has the same one."""
        self.agenda = agenda
        self.is_alive = True
        self.is_hung = False
        self._backlog: list[Action] = []

    @property
    def runs(self) -> bool:
        return self.is_alive and not self.is_hung

    @property
    def now_ns(self) -> int:
        return self.agenda.now_ns

    def do(self, action: Action) -> None:
        """Now, or when the process wakes; never once it is dead."""
        if self.is_hung:
            self._backlog.append(action)
        elif self.is_alive:
            action()

    def after(self, delay_ns: int, action: Action) -> None:
        self.agenda.after(delay_ns, lambda: self.do(action))

    def every(self, period_ns: int, action: Action) -> None:
        """Again and again, the first time after one period. A process that stood still does not catch up."""

        def beat() -> None:
            action()
            self.after(period_ns, beat)

        self.after(period_ns, beat)

    def hang(self) -> None:
        self.is_hung = True

    def wake(self) -> None:
        """All that came meanwhile happens now, in its order."""
        self.is_hung = False
        backlog, self._backlog = self._backlog, []
        for action in backlog:
            self.do(action)

    def kill(self) -> None:
        self.is_alive = False
        self._backlog.clear()
