"""The committed stub of the kernels is what their bindings say."""

from pathlib import Path

from nanobind.stubgen import StubGen  # pyright: ignore[reportMissingTypeStubs]

from pdserve import _kernels

STUB = Path(__file__).resolve().parents[2] / "src" / "pdserve" / "_kernels.pyi"


def test_stub_of_the_kernels_equals_the_generated_one() -> None:
    generator = StubGen(_kernels)
    generator.put(_kernels)
    assert STUB.read_text() == generator.get(), (
        "write it anew: .venv/bin/python -m nanobind.stubgen -m pdserve._kernels -o src/pdserve/_kernels.pyi"
    )
