"""The flags of a deployment's parallelism, for every command that starts one."""

import argparse


def add_parallel_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefill-tp", type=int, default=1, metavar="N", help="ranks of each prefill worker (default: 1)"
    )
    parser.add_argument(
        "--decode-tp", type=int, default=1, metavar="N", help="ranks that share a model on decode workers (default: 1)"
    )
    parser.add_argument(
        "--decode-dp", type=int, default=1, metavar="N", help="whole models in each decode worker (default: 1)"
    )
