"""What a gateway is started with."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.config.drain import DEFAULT_DRAIN_TIMEOUT_S
from pdserve.config.tls import Tls
from pdserve.gateway.formats.parser_choice import ReasoningParserChoice, ToolParserChoice
from pdserve.units import MIB
from pdserve.wire.http_listener import HEAD_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    model_name: str
    """The name clients ask for; `default` names it too. A worker of another name is refused."""
    model_dir: Path
    """Where the tokenizer lies."""
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    """Bearer token of `/v1/*`, `/tokenize` and `/detokenize`; None: open."""
    cluster_secret: str | None = field(default=None, repr=False)
    """What workers must know, and prove; None: anybody may join. Set it unless `host` is loopback."""
    tls: Tls | None = None
    """For workers' connections, which come in at `control_port` then, and nowhere else. None: they are plain."""
    control_port: int = 0
    api_tls: ssl.SSLContext | None = field(default=None, repr=False)
    """For `port`; None: plain HTTP."""
    tool_parser: ToolParserChoice = ToolParserChoice.AUTO
    """How the model writes calls of tools."""
    reasoning_parser: ReasoningParserChoice = ReasoningParserChoice.AUTO
    """How the model writes its reasoning."""
    max_connections: int = 2048
    """On `port`, of clients, probes and, without `tls`, workers; fewer where the process may not open twice as many
    files. At one more, the one that waits longest without a request is closed."""
    max_workers: int = 256
    max_pending: int = 1024
    """Requests at a time; one more is answered with 429."""
    max_body_bytes: int = 4 * MIB
    """A larger body is answered with 413."""
    max_bodies_bytes: int = 256 * MIB
    """Of all bodies on the way; one that goes over is answered with 429."""
    max_buffered_deltas: int = 1024
    """Steps that a streaming client may lag behind before its request is aborted: at 20 ms a step, 20 s."""
    request_timeout_s: float = 600.0
    """From reading the request to its last token; then 504."""
    head_timeout_s: float = HEAD_TIMEOUT_S
    """For a client to send the head of its first request; then its connection is closed."""
    body_timeout_s: float = 30.0
    """For a client to send its body; then 408."""
    write_timeout_s: float = 30.0
    """For a client to take a chunk; then its connection is cut."""
    drain_timeout_s: float = DEFAULT_DRAIN_TIMEOUT_S
    """From the signal to stop; what runs still is answered with 503 then. 0: at once."""

    @property
    def max_posted(self) -> int:
        """Requests that may be posted at a time, their bodies on the way included; the other connections are kept for
        workers and probes."""
        return self.max_connections * 3 // 4
