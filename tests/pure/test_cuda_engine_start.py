"""Engines that are asked for on CUDA devices, where there are none."""

from ctypes.util import find_library
from pathlib import Path

import msgspec
import pytest
from tests.process.engine_under_test import spec_of
from tests.pure.tiny_checkpoints import write_checkpoint

from pdserve.engine.client import start_engine
from pdserve.engine.shape import info_of
from pdserve.errors import ConfigError


def test_cuda_devices_for_another_number_of_ranks_are_refused(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(spec_of(tmp_path, tensor_parallel_size=2), cuda_devices=(0,))
    with pytest.raises(ConfigError, match=r"2 ranks can't be spread over CUDA devices \(0,\)"):
        info_of(spec)


@pytest.mark.skipif(find_library("cuda") is not None, reason="needs a machine without NVIDIA driver")
async def test_engine_on_cuda_without_driver_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.driver")
    write_checkpoint("qwen3", tmp_path)
    with pytest.raises(ConfigError, match="install an NVIDIA driver"):
        await start_engine(msgspec.structs.replace(spec_of(tmp_path), cuda_devices=(0,)))
