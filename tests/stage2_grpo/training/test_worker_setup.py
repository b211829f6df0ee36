"""What every process of stage 2 changes in VERL, on VERL's own classes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stage2_grpo.training import cpu_backend

pytestmark = pytest.mark.slow

SEND_TO_NOBODY = """
import asyncio, sys
from stage2_grpo.training import worker_setup

worker_setup._SYNC_SECONDS = 0.2
worker_setup.setup()
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

sender = BucketedWeightSender("ipc://" + sys.argv[1], bucket_size_mb=1, use_shm=True)
asyncio.run(sender.async_send_weights(iter([])))
"""


def test_a_server_that_takes_no_weights_ends_the_sync_with_the_reason(tmp_path: Path) -> None:
    """In a process of its own: what `setup` changes stays changed, and VERL wants it before its first import."""
    sent = subprocess.run(
        [sys.executable, "-c", SEND_TO_NOBODY, str(tmp_path / "socket")],
        env={**os.environ, cpu_backend.SWITCH: "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert sent.returncode != 0
    assert "WeightsOutOfSync: The rollout server did not take the trained weights" in sent.stderr
