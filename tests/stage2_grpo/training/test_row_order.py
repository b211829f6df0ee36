"""The order of the training rows over a resumption, with the data loader and sampler that VERL uses."""

from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROWS, BATCH, EPOCHS = 12, 4, 3


def loader() -> Any:
    """As VERL makes it for a run (`create_rl_sampler`, `RayPPOTrainer._create_dataloader`)."""
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import RandomSampler

    rows = list(range(ROWS))
    sampler = RandomSampler(data_source=rows, generator=torch.Generator().manual_seed(0))
    return StatefulDataLoader(dataset=rows, batch_size=BATCH, num_workers=0, drop_last=True, sampler=sampler)


def steps(dataloader: Any, count: int) -> list[list[int]]:
    batches: list[list[int]] = []
    while len(batches) < count:
        batches += [batch.tolist() for batch in dataloader]
    return batches[:count]


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_run_resumed_at_the_end_of_an_epoch_sees_the_rows_of_the_next_one(epoch: int) -> None:
    from stage2_grpo.training.guarded_trainer import skip_epochs

    whole = steps(loader(), EPOCHS * ROWS // BATCH)
    done = epoch * ROWS // BATCH
    resumed = loader()
    skip_epochs(resumed, done)
    assert steps(resumed, len(whole) - done) == whole[done:]
    assert whole[:3] != whole[3:6]


def test_in_the_middle_of_an_epoch_nothing_is_skipped() -> None:
    from stage2_grpo.training.guarded_trainer import skip_epochs

    resumed = loader()
    skip_epochs(resumed, 4)
    assert steps(resumed, 3) == steps(loader(), 3)
