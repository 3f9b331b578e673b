"""Which rows of which tensors of a checkpoint make up a parameter of one rank.

Every product is cut by output columns (see `parallel.py`), and those are the rows of its weight: a rank's part of any
tensor is one run of rows. Modules name the tensors of their parameters in `sources`; `weights.py` reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pdserve.model.parallel import Columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One rank's rows of a checkpoint's tensor."""

    tensor: str
    cut: Columns | None = None
    """None: the whole tensor, on every rank."""
    keeps_float32: bool = False
    """True for what is computed in float32 whatever the dtype of the model."""

    def under(self, prefix: str) -> "Rows":
        return replace(self, tensor=prefix + self.tensor)


Sources = Mapping[str, tuple[Rows, ...]]
"""Parameter -> the rows that make it up, one below the other."""


def nested(parameter_prefix: str, tensor_prefix: str, sources: Sources) -> Sources:
    """The sources of a submodule, in the names of its owner."""
    return {
        parameter_prefix + name: tuple(rows.under(tensor_prefix) for rows in parts) for name, parts in sources.items()
    }
