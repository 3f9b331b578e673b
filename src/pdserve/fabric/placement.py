"""Where the writes of a push begin and end and which NICs they go over, for fabrics written in Python.

The rules are those of `native/fabric/`: `region.h`, `page_push.h` and `striping.h`.
"""

from pdserve.errors import FabricError
from pdserve.fabric.port import PagePush, RegionDescriptor, SingleWrite


def num_layers_of(push: PagePush | SingleWrite) -> int:
    return push.num_layers if isinstance(push, PagePush) else 1


def due_tick(push: PagePush | SingleWrite, layer_index: int) -> int:
    """What the layer counter must have reached before the layer is posted."""
    return push.first_tick + layer_index + 1 if isinstance(push, PagePush) else push.tick


def num_writes_per_layer(push: PagePush | SingleWrite) -> int:
    return len(push.source_pages) if isinstance(push, PagePush) else 1


def write_offsets(push: PagePush | SingleWrite, *, layer_index: int, write_index: int) -> tuple[int, int, int]:
    """`(source offset, target offset, bytes)` of one write."""
    if isinstance(push, SingleWrite):
        return push.source_offset, push.target_offset, push.num_bytes
    source_page, target_page = int(push.source_pages[write_index]), int(push.target_pages[write_index])
    return (
        push.source_offset + layer_index * push.source_layer_bytes + source_page * push.source_page_bytes,
        push.target_offset + layer_index * push.target_layer_bytes + target_page * push.target_page_bytes,
        push.run_bytes,
    )


def nic_pairs(*, num_local: int, num_remote: int) -> list[tuple[int, int]]:
    """(NIC of ours, NIC of theirs) of each pair that writes between two regions go over, as places in their NICs."""
    return [(pair % num_local, pair % num_remote) for pair in range(max(num_local, num_remote))]


def first_pair(push: PagePush | SingleWrite) -> int:
    """The pair of write 0 of each layer, modulo the number of pairs; scattered for single writes."""
    return 0 if isinstance(push, PagePush) else (push.push_id * 0x9E3779B97F4A7C15) % (1 << 64) >> 32


def require_inside(push: PagePush | SingleWrite, *, source_bytes: int, target_bytes: int) -> None:
    """Raises: `FabricError` unless every write is inside both regions."""
    num_layers = num_layers_of(push)
    if isinstance(push, PagePush):
        if len(push.source_pages) != len(push.target_pages):
            raise FabricError(
                f"arm: {len(push.source_pages)} source pages for {len(push.target_pages)} target pages", operation="arm"
            )
        if len(push.source_pages) == 0:
            return
    if num_layers < 1 or (push.run_bytes if isinstance(push, PagePush) else push.num_bytes) < 1:
        raise FabricError("arm: a push has at least one layer and one byte", operation="arm")
    for write_index in range(num_writes_per_layer(push)):
        source, target, num_bytes = write_offsets(push, layer_index=num_layers - 1, write_index=write_index)
        for side, start, region_bytes in (("source", source, source_bytes), ("target", target, target_bytes)):
            if start + num_bytes > region_bytes:
                raise FabricError(
                    f"arm: push {push.push_id} would leave the {side} region of {region_bytes} bytes", operation="arm"
                )


def require_gapless(descriptor: RegionDescriptor) -> None:
    """Raises: `FabricError` unless the slices cover the region without gaps or overlap."""
    covered = 0
    for part in descriptor.slices:
        if part.start != covered or part.num_bytes < 1:
            raise FabricError(f"attach: a slice starts at {part.start}, not at {covered}", operation="attach")
        covered += part.num_bytes
    if covered != descriptor.num_bytes or covered == 0:
        raise FabricError(f"attach: slices cover {covered} of {descriptor.num_bytes} bytes", operation="attach")


def require_nics(descriptor: RegionDescriptor, *, num_peer_nics: int) -> None:
    """Raises: `FabricError` unless the descriptor names NICs of its peer, each once, and a key for each."""
    nics = descriptor.nics
    if not nics or len(set(nics)) < len(nics) or not all(0 <= nic < num_peer_nics for nic in nics):
        raise FabricError(f"attach: NICs {nics} of a peer that has {num_peer_nics}", operation="attach")
    for part in descriptor.slices:
        if len(part.keys) != len(nics):
            raise FabricError(f"attach: {len(part.keys)} keys for {len(nics)} NICs", operation="attach")
