"""A Hugging Face directory's weights, loaded into a module: one rank's part of them, or all."""

from pathlib import Path

import torch
from torch import nn

from pdserve.model.config import ModelConfig
from pdserve.model.decoder import Decoder
from pdserve.model.parallel import Communicator
from pdserve.model.tensors import CheckpointTensors
from pdserve.model.weight_rows import Sources


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
    load_parameters(decoder, decoder.sources(), tensors, dtype=dtype, device=device)
    if config.has_tied_embeddings:
        vocab = decoder.cuts.vocab.ours
        assign_parameter(decoder, "lm_head.weight", decoder.embedding.weight[vocab.start : vocab.stop])
    decoder.complete(device)
    return decoder.eval()


def load_parameters(
    module: nn.Module, sources: Sources, tensors: CheckpointTensors, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Into the parameters that `sources` names; they may be on the meta device.

    Raises: `ConfigError` when a tensor is missing or has another shape.
    """
    for name, parts in sources.items():
        shape = module.get_parameter(name).shape
        loaded = torch.cat([tensors.read(rows, parameter_shape=shape, dtype=dtype) for rows in parts]).to(device)
        assign_parameter(module, name, loaded)


def assign_parameter(module: nn.Module, name: str, values: torch.Tensor) -> None:
    owner_name, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner_name), leaf, nn.Parameter(values, requires_grad=False))
