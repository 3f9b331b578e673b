"""Device memory that two processes map: what `SharedRegion` promises, and what torch makes of it."""

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from tests.gpu.cuda_region_child import REPLY
from tests.gpu.device_bytes import read_bytes, write_bytes

from pdserve.engine.cuda_region import CudaRegion
from pdserve.engine.kv_storage import KvStorage
from pdserve.errors import ConfigError
from pdserve.kv.layout import KvLayout

ROOT = Path(__file__).resolve().parents[2]
NUM_BYTES = 5_000_000
TIMEOUT_S = 60.0


@pytest.fixture
def region() -> Generator[CudaRegion]:
    with closing(CudaRegion.create(num_bytes=NUM_BYTES, device_index=0)) as region:
        yield region


def whole(region: CudaRegion) -> bytes:
    return read_bytes(region, start=0, num_bytes=region.num_bytes)


def device_memory_bytes() -> int:
    _, num_bytes = torch.cuda.mem_get_info(0)
    return num_bytes


def run_child(region: CudaRegion) -> str:
    """What a process that maps the region says."""
    finished = subprocess.run(
        [sys.executable, "-m", "tests.gpu.cuda_region_child", str(region.fd), str(NUM_BYTES)],
        cwd=ROOT,
        pass_fds=(region.fd,),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_cuda_region_is_zeroed_and_rounded_up(region: CudaRegion) -> None:
    assert NUM_BYTES <= region.num_bytes < NUM_BYTES + 64 * 2**20
    assert whole(region) == bytes(region.num_bytes)


def test_cuda_region_in_another_process_shows_the_same_bytes_both_ways(region: CudaRegion) -> None:
    payload = os.urandom(region.num_bytes)
    write_bytes(region, payload, start=0)
    assert run_child(region) == sha256(payload).hexdigest()
    assert whole(region) == payload[: -len(REPLY)] + REPLY


def test_cuda_region_mapped_twice_outlives_its_maker() -> None:
    maker = CudaRegion.create(num_bytes=NUM_BYTES, device_index=0)
    with closing(CudaRegion.from_fd(os.dup(maker.fd), num_bytes=NUM_BYTES, device_index=0)) as other:
        write_bytes(maker, b"abc", start=3)
        maker.close()
        assert read_bytes(other, start=2, num_bytes=5) == b"\0abc\0"


def test_cuda_region_after_close_leaves_no_descriptor_and_no_memory() -> None:
    num_bytes = device_memory_bytes() // 3
    for _ in range(4):
        region = CudaRegion.create(num_bytes=num_bytes, device_index=0)
        region.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(region.fd)


def test_cuda_region_larger_than_the_device_is_refused() -> None:
    num_bytes = 2 * device_memory_bytes()
    with pytest.raises(ConfigError, match=r"CUDA_ERROR_OUT_OF_MEMORY: .* lower --kv-tokens"):
        CudaRegion.create(num_bytes=num_bytes, device_index=0)


def test_cuda_region_on_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="CUDA_ERROR_INVALID_DEVICE"):
        CudaRegion.create(num_bytes=1, device_index=torch.cuda.device_count())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_storage_on_cuda_is_a_view_of_its_region(dtype: str) -> None:
    layout = KvLayout(num_layers=2, num_kv_heads=3, head_dim=8, page_slots=4, dtype=dtype, num_planes=2)
    storage = KvStorage.create(layout=layout, num_pages=5, cuda_device=0)
    assert isinstance(storage.region, CudaRegion)
    assert storage.pages_LPHKSD.device == torch.device("cuda", 0)
    storage.pages_LPHKSD.view(torch.uint8).fill_(7)
    torch.cuda.synchronize(0)
    num_bytes = layout.region_bytes(5)
    assert read_bytes(storage.region, start=0, num_bytes=num_bytes + 1) == b"\7" * num_bytes + b"\0"
    storage.region.close()
