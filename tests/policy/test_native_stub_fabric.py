"""The committed stub of the native fabric module is the one that its build would give."""

import subprocess
import sys
from pathlib import Path

STUB = Path(__file__).parents[2] / "src" / "pdserve" / "_fabric.pyi"


def test_fabric_stub_generated_anew_equals_the_committed_one(tmp_path: Path) -> None:
    generated = tmp_path / "_fabric.pyi"
    subprocess.run(
        [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "pdserve._fabric", "-o", str(generated)],
        check=True,
        timeout=60,
    )
    assert generated.read_text() == STUB.read_text(), (
        "regenerate it: python -m nanobind.stubgen -m pdserve._fabric -o src/pdserve/_fabric.pyi"
    )
