"""One worker: what `pdserve worker` is told."""

from dataclasses import dataclass

from pdserve.config.device import Device
from pdserve.config.drain import DEFAULT_DRAIN_TIMEOUT_S
from pdserve.config.role import Role
from pdserve.config.speculation import Speculation
from pdserve.config.tls import Tls

PROVIDERS = ("tcp", "shm", "efa", "verbs")
"""`tcp` is `tcp;ofi_rxm`. `efa` and `verbs` take the same path and are untested on hardware."""

DEFAULT_PAGE_SLOTS = 16
"""vLLM's and SGLang's usual page; 24,576 bytes a write on SmolLM2, where tcp moves most of what it can."""

DEFAULT_KV_TOKENS = 16_384
"""Two full contexts of SmolLM2: 755 MB in float32."""

DEFAULT_CHUNK_TOKENS = 256
"""A pass of 256 tokens takes about 0.8 s on one core: the longest that a short prompt waits for the pass before it."""

DEFAULT_SATURATION_TOKENS = 64
"""Above about this many rows a float32 GEMM on one core gains nothing from more (benchmarks, `bench-engine`)."""

DEFAULT_MAX_RUNNING = 64
DEFAULT_MAX_WAITING = 512
DEFAULT_LEASE_S = 10.0
HEARTBEATS_A_LEASE = 10
DEFAULT_AGEING_TOKENS_PER_S = 100
"""A 2,000-token prompt that waited 20 s goes before any newcomer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Resolved: nothing is left to guess. Token and page figures are of one data parallel rank."""

    name: str
    role: Role
    join_url: str
    """The gateway, such as `http://127.0.0.1:8000`."""
    model_dir: str
    model_name: str
    host: str = "127.0.0.1"
    """Where the worker listens, and the address that others are told."""
    port: int = 0
    """0: any free one."""
    provider: str = "tcp"
    fabric_hosts: tuple[str, ...] = ("127.0.0.1",)
    """The addresses of the interfaces that the fabric uses, one a NIC; pushes are striped over them. Empty: those near
    each rank, as `pdserve topology` shows them."""
    device: Device = Device.CPU
    cpus: tuple[int, ...] = ()
    """Cores to run on; empty: not pinned."""
    num_threads: int = 1
    """Of each rank."""
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    """Of a decode or colocated worker: as many tensor parallel groups, each with its KV cache and scheduler."""
    page_slots: int = DEFAULT_PAGE_SLOTS
    kv_tokens: int = DEFAULT_KV_TOKENS
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    """The most prompt tokens in one pass."""
    saturation_tokens: int = DEFAULT_SATURATION_TOKENS
    """Prompts are packed into one pass up to this; see `pdserve.schedule`."""
    ageing_tokens_per_s: int = DEFAULT_AGEING_TOKENS_PER_S
    max_running: int = DEFAULT_MAX_RUNNING
    max_waiting: int = DEFAULT_MAX_WAITING
    num_tail_slots: int = 1024
    speculation: Speculation | None = None
    """A drafter that is a model must be the same on prefill and decode workers: its KV is handed over too."""
    lease_s: float = DEFAULT_LEASE_S
    """Silence for so long is death. By default ten heartbeats: a pinned core may be busy with a pass for a second."""
    heartbeat_s: float = DEFAULT_LEASE_S / HEARTBEATS_A_LEASE
    join_timeout_s: float = 30.0
    drain_timeout_s: float = DEFAULT_DRAIN_TIMEOUT_S
    """From the signal to stop; what runs still is failed then. 0: at once."""
    secret: str | None = None
    tls: Tls | None = None
    """For control connections, both those that come in and those that it dials. None: they are plain."""
    control_port: int = 0
    """Where control connections come in with `tls`; 0: any free one. Without, they come in at `port`."""
    capture_kv: bool = False
    """Keep the KV of the last prompts for `verify-handoff`; costs a copy a request."""
    allow_stop_at: bool = False
    """Let `PUT /debug/stop-at/STATE` stop the process at a state of a handoff, for `verify-faults`."""
