"""The best model that is known for a placement: that of a table, or else an estimate."""

from importlib.resources import files
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.perfmodel.fitted import FittedModel
from pdserve.perfmodel.placement import Placement
from pdserve.perfmodel.profile import Profile, decode_profile
from pdserve.perfmodel.roofline import roofline_model


def table_name(placement: Placement) -> str:
    """The name of its file, whether there is one or not."""
    sharding = f"tp{placement.tensor_parallel_size}-dp{placement.data_parallel_size}"
    return f"{placement.hardware.name}-{placement.shape.name}-{sharding}.json"


def stored_profile(placement: Placement, *, tables: Path | None = None) -> Profile | None:
    """From a folder of tables, those that come with pdserve by default; none when none is for this placement.

    Raises: `ConfigError` when its file is no profile.
    """
    name = table_name(placement)
    file = (tables or files("pdserve.perfmodel") / "tables") / name
    return decode_profile(file.read_bytes(), name=name) if file.is_file() else None


def known_model(placement: Placement, *, tables: Path | None = None) -> FittedModel:
    """Its provenance says which of the two it is. Raises: `ConfigError` when the weights do not fit."""
    if not placement.kv_tokens:
        raise ConfigError(
            f"{placement} does not fit: {placement.weight_bytes / 1e9:.0f} GB of weights on each accelerator of "
            f"{placement.hardware.memory_bytes / 1e9:.0f} GB; choose more ranks"
        )
    profile = stored_profile(placement, tables=tables)
    return roofline_model(placement) if profile is None else profile.model
