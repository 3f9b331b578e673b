"""`python cuda_region_child.py FD NUM_BYTES`: a process that maps a region, as a worker's main process does.

Prints the sum of the bytes in hexadecimal, then writes `REPLY` at the end.
"""

import sys
from hashlib import sha256

from tests.gpu.device_bytes import read_bytes, write_bytes

from pdserve.engine.cuda_region import CudaRegion

REPLY = b"seen by the child"


def main() -> None:
    fd, num_bytes = map(int, sys.argv[1:])
    region = CudaRegion.from_fd(fd, num_bytes=num_bytes, device_index=0)
    print(sha256(read_bytes(region, start=0, num_bytes=region.num_bytes)).hexdigest())
    write_bytes(region, REPLY, start=region.num_bytes - len(REPLY))
    region.close()
    if "torch" in sys.modules:
        sys.exit("mapping a region loaded torch")


if __name__ == "__main__":
    main()
