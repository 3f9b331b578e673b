"""How processes share out the cores they are given."""


def share_of_cpus(cpus: tuple[int, ...], *, index: int, num_shares: int) -> tuple[int, ...]:
    """Equal runs of cores; one core each, in turns, when there are fewer cores than shares. No cores: not pinned."""
    if not cpus:
        return ()
    if len(cpus) < num_shares:
        return (cpus[index % len(cpus)],)
    return cpus[index * len(cpus) // num_shares : (index + 1) * len(cpus) // num_shares]
