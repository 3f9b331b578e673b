"""A deployment whose control connections are in TLS, end to end."""

import os
from pathlib import Path

import pytest
from tests.process.deployment_under_test import API_KEY, SECRET, WORKER_FLAGS, connected
from tests.pure.certificates import Authority

from pdserve.bench.tiny_models import TINY_NAMES, prepare_tiny
from pdserve.cli.tls import tls_flags
from pdserve.config.deployment import DeploymentRequest, place_workers
from pdserve.config.tls import load_tls
from pdserve.errors import AuthenticationError
from pdserve.launch.deployment import DeploymentSettings, LocalDeployment
from pdserve.wire.channel import dial
from pdserve.wire.codec import worker_codec


async def test_deployment_in_tls_hands_over_and_turns_a_plain_worker_away(tmp_path: Path) -> None:
    cpus = tuple(sorted(os.sched_getaffinity(0))[:2])
    settings = DeploymentSettings(
        model_dir=str(prepare_tiny(TINY_NAMES[0])),
        model_name="tiny",
        places=place_workers(DeploymentRequest(num_prefill=1, num_decode=1, num_colocated=0, available_cpus=cpus)),
        worker_arguments=WORKER_FLAGS,
        tls_arguments=tls_flags(load_tls(Authority(tmp_path).files())),
        environment={"PDSERVE_API_KEY": API_KEY, "PDSERVE_CLUSTER_SECRET": SECRET},
    )
    async with LocalDeployment(settings) as started, connected(started.url) as running:
        assert (await running.complete(list(range(1, 41)), max_tokens=2)).num_tokens == 2
        assert await running.metric("pdserve:prefills_total", place="remote") == 1
        for worker in (await running.workers()).values():
            assert worker["url"].startswith("https://")
        with pytest.raises(AuthenticationError, match="in TLS only; start both ends with --tls-cert"):
            await dial(running.session, f"{started.url}/cluster", worker_codec(), secret=SECRET, timeout_s=5.0)
        assert await running.metric("pdserve:authentications_refused_total", credential="certificate") == 1
