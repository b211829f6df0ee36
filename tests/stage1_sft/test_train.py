"""Training on a tiny random model: it learns, and a kill -9 changes nothing in the result."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

from shared.errors import UserError  # noqa: E402
from stage1_sft.dataset import IGNORED  # noqa: E402
from stage1_sft.shared_prefix import token_loss  # noqa: E402
from stage1_sft.train import batch_order, newest_checkpoint, train  # noqa: E402
from tests.stage1_sft.examples import ROOT  # noqa: E402
from tests.stage1_sft.training import examples, tiny_run  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny_model import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("model"))


def _adapter(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def test_training_lowers_the_loss_and_keeps_the_best_checkpoint(tmp_path: Path, model: Path) -> None:
    adapter, figures = tiny_run(model, tmp_path)
    assert figures["steps"] == 12
    assert figures["eval_loss"] < 6.0  # ln(500) = 6.2 for guessing
    assert adapter.parent == tmp_path / "checkpoints"
    assert (adapter / "adapter_model.safetensors").exists()
    assert "sft/eval_loss" in (tmp_path / "metrics.jsonl").read_text()


def test_a_killed_training_continues_to_the_same_weights(tmp_path: Path, model: Path) -> None:
    whole, whole_figures = tiny_run(model, tmp_path / "whole")
    folder = tmp_path / "killed"
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.stage1_sft.training", str(model), str(folder)], cwd=ROOT, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints" / "checkpoint-4" / "trainer_state.json").exists() and child.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    half_written = folder / "checkpoints" / "checkpoint-99"
    half_written.mkdir()
    (half_written / "adapter_model.safetensors").write_bytes(b"")
    resumed, resumed_figures = tiny_run(model, folder)
    assert not half_written.exists()
    assert resumed.name == whole.name
    assert resumed_figures["eval_loss"] == whole_figures["eval_loss"]
    expected = _adapter(whole)
    assert all(torch.equal(value, expected[name]) for name, value in _adapter(resumed).items())


def test_a_finished_training_trains_no_more(tmp_path: Path, model: Path) -> None:
    adapter, figures = tiny_run(model, tmp_path)
    again, figures_again = tiny_run(model, tmp_path)
    assert (again, figures_again["eval_loss"]) == (adapter, figures["eval_loss"])


def test_checkpoints_count_only_when_written_to_the_end(tmp_path: Path) -> None:
    for step, state in [(5, "{}"), (10, '{"global'), (15, None)]:
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        for name in ("adapter_model.safetensors", "adapter_config.json", "optimizer.pt", "scheduler.pt"):
            (folder / name).touch()
        if state:
            (folder / "trainer_state.json").write_text(state)
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-5"
    assert [folder.name for folder in tmp_path.iterdir()] == ["checkpoint-5"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_the_gpu_profile_without_a_gpu_is_refused(tmp_path: Path, model: Path) -> None:
    from shared.config.load import load_config

    config = load_config(ROOT / "pipeline.yaml", "gpu", ["logging.tensorboard=false"])
    with pytest.raises(UserError, match="--profile cpu"):
        train(model, examples(4), examples(2), config, tmp_path)


def test_gradient_checkpointing_trains_too(tmp_path: Path, model: Path) -> None:
    _, figures = tiny_run(model, tmp_path, "sft.gradient_checkpointing=true", "sft.epochs=1")
    assert figures["eval_loss"] < 6.2


@pytest.mark.parametrize("shared", [0, 40])
def test_the_shared_prefix_loss_equals_the_plain_one_with_its_gradients(model: Path, shared: int) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    ids = torch.randint(5, 250, (3, 90))
    ids[:, :shared] = ids[0, :shared]
    labels = torch.where(torch.rand(ids.shape) < 0.4, ids, IGNORED)
    labels[:, : shared + 2] = IGNORED
    labels[1, 70:] = IGNORED  # padding at the right
    found = []
    for attention, loss_of in [("eager", _plain_loss), ("sdpa", token_loss)]:
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=attention)
        loss = loss_of(network, ids, labels)
        loss.backward()
        found.append((loss.item(), network.model.layers[0].self_attn.k_proj.weight.grad.clone()))
    (plain, plain_gradient), (fast, fast_gradient) = found
    assert fast == pytest.approx(plain, rel=1e-5)
    assert torch.allclose(fast_gradient, plain_gradient, rtol=1e-3, atol=1e-6)


def _plain_loss(network: object, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return network(input_ids=ids, labels=labels).loss  # type: ignore[operator]


def test_batches_hold_like_lengths_and_every_epoch_holds_every_example_once() -> None:
    lengths = [(7 * i) % 100 for i in range(101)]
    order = batch_order(lengths, batch_size=4, epochs=2, seed=0)
    assert sorted(order) == sorted([*range(101), *range(101)])
    spreads = [max(batch) - min(batch) for batch in itertools.batched((lengths[i] for i in order[:200]), 4)]
    assert sum(spreads) / len(spreads) < 20  # 60 in a random order
    assert batch_order(lengths, batch_size=4, epochs=2, seed=0) == order
    assert len({*order[:100]}) == 100
    assert order[100:200] != order[:100]
