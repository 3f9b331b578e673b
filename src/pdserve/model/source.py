"""From what the operator names (nothing, a directory, a hub id) to a directory on this machine. Torch-free."""

from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.model import smollm2
from pdserve.model.checkpoint import weight_files
from pdserve.model.config import read_config

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    dir: Path
    name: str
    """What clients call the model."""


def resolve_model(name_or_path: str | None) -> ModelSource:
    """A directory with a supported config and weights.

    None, `default` and the default model's own name give the default model, converted on first use.

    Raises: `ConfigError` in one line.
    Cost: seconds for the first use of the default model, a download for a hub id.
    """
    if name_or_path is None or name_or_path in ("default", smollm2.MODEL_NAME):
        return ModelSource(dir=smollm2.prepare(), name=smollm2.MODEL_NAME)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        source = ModelSource(dir=path.resolve(), name=path.resolve().name)
    elif _looks_like_path(name_or_path):
        raise ConfigError(f"{name_or_path} is not a directory")
    else:
        source = ModelSource(dir=_download(name_or_path), name=name_or_path)
    read_config(source.dir)
    weight_files(source.dir)
    return source


def _looks_like_path(name_or_path: str) -> bool:
    return name_or_path.startswith(("/", "./", "../", "~")) or name_or_path.count("/") > 1


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except HFValidationError:
        raise ConfigError(f"{hub_id!r} is neither a directory nor a model id of the Hugging Face hub") from None
    except LocalEntryNotFoundError:
        raise ConfigError(
            f"{hub_id!r} is not a directory, and the Hugging Face hub can't be reached to download it"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(f"{hub_id!r} can't be downloaded: {str(error).splitlines()[0]}") from None
