"""From a model directory to what computes: the weights, loaded, on the executor that fits them."""

from pathlib import Path

from pdserve.engine.cpu_executor import CpuExecutor
from pdserve.engine.executor import Executor
from pdserve.engine.kv_storage import TORCH_DTYPES, KvStorage
from pdserve.engine.torch_executor import TorchExecutor
from pdserve.model.config import ModelConfig
from pdserve.model.parallel import Communicator
from pdserve.model.weights import load_decoder


def load_executor(
    model_dir: Path,
    config: ModelConfig,
    storage: KvStorage,
    *,
    communicator: Communicator,
    num_threads: int,
) -> Executor:
    """Of the rank's part of the model, in the type and on the device of its cache.

    Raises: `ConfigError` when the weights are not what the config says.
    """
    decoder = load_decoder(
        model_dir,
        config,
        dtype=TORCH_DTYPES[storage.layout.dtype],
        device=storage.pages_LPHKSD.device,
        communicator=communicator,
    )
    if CpuExecutor.fits(decoder):
        return CpuExecutor(decoder, storage, num_threads=num_threads)
    return TorchExecutor(decoder, storage)
