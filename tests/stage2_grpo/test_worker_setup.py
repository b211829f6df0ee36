"""What every process of stage 2 changes in VERL, on VERL's own classes."""

import asyncio
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_a_server_that_takes_no_weights_ends_the_sync_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as module

    from stage2_grpo import worker_setup
    from stage2_grpo.trainer import WeightsOutOfSync

    class Sender(module.BucketedWeightSender):  # so that the patch does not outlive the test
        pass

    monkeypatch.setattr(module, "BucketedWeightSender", Sender)
    monkeypatch.setattr(worker_setup, "_SYNC_SECONDS", 0.2)
    worker_setup.end_stuck_sync(module)
    sender = Sender(f"ipc://{tmp_path / 'socket'}", bucket_size_mb=1, use_shm=True)
    with pytest.raises(WeightsOutOfSync, match="did not take the trained weights"):
        asyncio.run(sender.async_send_weights(iter([])))
