"""A Hugging Face directory's weights, loaded into a `Decoder`: one rank's part of them, or all."""

from pathlib import Path

import torch
from torch import nn

from pdserve.model.config import ModelConfig
from pdserve.model.decoder import Decoder
from pdserve.model.parallel import Communicator
from pdserve.model.tensors import CheckpointTensors


def load_decoder(
    model_dir: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    communicator: Communicator | None = None,
) -> Decoder:
    """Reads the rows that the communicator's rank needs, and no others. Without a communicator: all of the model.

    Raises: `ConfigError` when a tensor is missing or has another shape than the config says, or when the model can't be
        cut over so many ranks.
    """
    with torch.device("meta"):
        decoder = Decoder(config, communicator)
    tensors = CheckpointTensors(model_dir, fp8_block=config.fp8_block)
    for name, parts in decoder.sources().items():
        shape = decoder.get_parameter(name).shape
        loaded = torch.cat([tensors.read(rows, parameter_shape=shape, dtype=dtype) for rows in parts]).to(device)
        _assign(decoder, name, loaded)
    if config.has_tied_embeddings:
        vocab = decoder.cuts.vocab.ours
        _assign(decoder, "lm_head.weight", decoder.embedding.weight[vocab.start : vocab.stop])
    decoder.complete(device)
    return decoder.eval()


def _assign(decoder: Decoder, name: str, values: torch.Tensor) -> None:
    owner_name, _, leaf = name.rpartition(".")
    setattr(decoder.get_submodule(owner_name), leaf, nn.Parameter(values, requires_grad=False))
