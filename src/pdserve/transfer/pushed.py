"""The instants of a push that ended, layer by layer."""

from dataclasses import dataclass

from pdserve.fabric.port import LayerTimes, PagePush, PushEnded, SingleWrite
from pdserve.layer_counter import ticks_per_pass
from pdserve.wire.peer import Grant


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedLayers:
    """The instants of one push of a chunk, from a rank to a rank, for the trace; the tail is a push of one layer."""

    grant: Grant
    is_tail: bool
    first_layer: int
    """As the layer counter counts: the model's layers, then the drafter's."""
    layer_bytes: int
    """Written for each layer."""
    layers: tuple[LayerTimes, ...]


def pushed_layers(grant: Grant, push: PagePush | SingleWrite, event: PushEnded, *, num_layers: int) -> PushedLayers:
    """`num_layers` are those that the layer counter counts."""
    match push:
        case PagePush():
            layer_bytes = len(push.source_pages) * push.run_bytes
            first_layer = push.first_tick % ticks_per_pass(num_layers)
        case SingleWrite():
            layer_bytes, first_layer = push.num_bytes, num_layers
    return PushedLayers(
        grant=grant,
        is_tail=isinstance(push, SingleWrite),
        first_layer=first_layer,
        layer_bytes=layer_bytes,
        layers=event.layers,
    )
