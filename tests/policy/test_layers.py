"""The layers hold: as import-linter sees them in the sources, and as the interpreter sees them when it runs."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from importlinter import cli

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "pdserve"
LOADS_TORCH = {"model", "engine", "worker", "cli"}

IMPORT_ALL_WITHOUT_TORCH = """
import importlib, pkgutil, sys
import pdserve

for module in pkgutil.walk_packages(pdserve.__path__, "pdserve."):
    parts = module.name.split(".")
    if parts[1] in {"model", "engine"} or parts[1].startswith("_") or parts[-1] == "__main__":
        continue
    importlib.import_module(module.name)
    if "torch" in sys.modules:
        sys.exit(f"importing {module.name} loads torch; import it where it is used")
"""


def contract(contract_id: str) -> dict[str, Any]:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = configuration["tool"]["importlinter"]["contracts"]
    return next(candidate for candidate in contracts if candidate["id"] == contract_id)


def no_logging(configuration: object) -> None:
    del configuration


def test_layer_contracts_over_all_modules_are_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    # Else it silences every logger that there is, for all tests that come after.
    monkeypatch.setattr("logging.config.dictConfig", no_logging)
    exit_code = cli.lint_imports(no_cache=True)
    if exit_code != cli.EXIT_STATUS_SUCCESS:
        pytest.fail(capsys.readouterr().out, pytrace=False)


def test_torch_contract_names_all_that_may_not_load_it() -> None:
    modules = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    named = {name.removeprefix("pdserve.") for name in contract("torch")["source_modules"]}
    assert modules - {"__init__", "__main__"} - LOADS_TORCH == named


def test_importing_all_but_model_and_engine_loads_no_torch() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL_WITHOUT_TORCH],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
