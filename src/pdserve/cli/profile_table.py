"""A profile as tables for people: what was measured, what the model says of it, and how far off it is elsewhere."""

from typing import TYPE_CHECKING

from pdserve.perfmodel.fit import Accuracy
from pdserve.perfmodel.profile import Profile
from pdserve.perfmodel.sample import PassSample, PushSample
from pdserve.units import KIB, NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from pdserve.bench.profile import Timings

MS_PER_S = NS_PER_S // NS_PER_MS
_PASS_HEAD = (
    f"{'pass':<8} {'prefill tokens':>14} {'keys':>9} {'decode tokens':>14} {'keys':>9} "
    f"{'ms':>9} {'model':>9} {'off':>6}"
)
_PUSH_HEAD = f"{'push KiB':>10} {'ms':>9} {'model':>9} {'off':>6} {'GB/s':>6}"


def format_profile(profile: Profile) -> str:
    """Every sample beside the model that was fitted to it, and where the numbers come from."""
    return "\n".join(
        [
            _PASS_HEAD,
            *(_pass_line(sample, profile) for sample in profile.passes),
            "",
            _PUSH_HEAD,
            *(_push_line(sample, profile) for sample in profile.pushes),
            "",
            *(f"{source.made_by}; {source.date}; {source.machine}" for source in profile.sources.values()),
            f"{profile.subject}; on samples that the model was not fitted to: {format_accuracy(profile.accuracy)}",
        ]
    )


def format_timings(timings: "Timings") -> str:
    """The samples of a measurement that may have ended early."""
    passes = [f"{MS_PER_S * sample.seconds:>9.2f} ms  {sample.shape}" for sample in timings.pass_samples()]
    pushes = [f"{MS_PER_S * sample.seconds:>9.2f} ms  {sample.num_bytes} bytes" for sample in timings.push_samples()]
    return "\n".join([*passes, *pushes])


def format_accuracy(accuracy: Accuracy) -> str:
    errors = {
        "prefill_mape": accuracy.prefill_mape,
        "decode_mape": accuracy.decode_mape,
        "mixed_mape": accuracy.mixed_mape,
        "push_mape": accuracy.push_mape,
    }
    return " ".join(f"{name}={error:.1%}" for name, error in errors.items() if error is not None)


def _pass_line(sample: PassSample, profile: Profile) -> str:
    shape, model_s = sample.shape, profile.model.pass_s(sample.shape)
    return (
        f"{sample.kind.value:<8} {shape.num_prefill_tokens:>14} {shape.num_prefill_keys:>9} "
        f"{shape.num_decode_tokens:>14} {shape.num_decode_keys:>9} {MS_PER_S * sample.seconds:>9.2f} "
        f"{MS_PER_S * model_s:>9.2f} {model_s / sample.seconds - 1:>+6.1%}"
    )


def _push_line(sample: PushSample, profile: Profile) -> str:
    model_s = profile.model.push_s(sample.num_bytes)
    return (
        f"{sample.num_bytes / KIB:>10.0f} {MS_PER_S * sample.seconds:>9.2f} {MS_PER_S * model_s:>9.2f} "
        f"{model_s / sample.seconds - 1:>+6.1%} {sample.num_bytes / sample.seconds / 1e9:>6.2f}"
    )
