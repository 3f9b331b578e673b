"""`python -m tests.gpu.cuda_region_child FD NUM_BYTES`: maps a region, as a worker's main process does.

Writes the SHA-256 of the bytes in hexadecimal to standard output, and `REPLY` over the last ones of the region.
"""

import sys
from hashlib import sha256

from tests.gpu.device_bytes import read_bytes, write_bytes

from pdserve.engine.cuda_region import CudaRegion

REPLY = b"seen by the child"


def main() -> None:
    fd, num_bytes = map(int, sys.argv[1:])
    region = CudaRegion.from_fd(fd, num_bytes=num_bytes, device_index=0)
    sys.stdout.write(sha256(read_bytes(region, start=0, num_bytes=region.num_bytes)).hexdigest())
    write_bytes(region, REPLY, start=region.num_bytes - len(REPLY))
    region.close()
    if "torch" in sys.modules:
        sys.exit("mapping a region loaded torch")


if __name__ == "__main__":
    main()
