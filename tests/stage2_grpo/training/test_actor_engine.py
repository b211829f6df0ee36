"""Log-probabilities where tokens are trained: the same numbers and gradients as over everything, and no flat rows."""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

from stage2_grpo.training import actor_engine  # noqa: E402
from stage2_grpo.training.actor_engine import trained_log_probs  # noqa: E402

PROMPT, RESPONSE = 5, 8  # longest, in tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoModelForCausalLM

    from tests.tiny_model import save_tiny_model

    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def batch(lengths: list[tuple[int, int]], temperature: float = 1.0) -> dict[str, Any]:
    """Rows of (prompt, response) tokens in VERL's form; every third token of a response is an observation."""
    torch.manual_seed(1)
    rows = [torch.randint(10, 200, (prompt + response,)) for prompt, response in lengths]
    attention = torch.zeros(len(rows), PROMPT + RESPONSE, dtype=torch.long)
    loss_mask = torch.zeros(len(rows), RESPONSE, dtype=torch.long)
    for row, (prompt, response) in enumerate(lengths):
        attention[row, PROMPT - prompt : PROMPT + response] = 1
        loss_mask[row, :response] = torch.tensor([place % 3 != 1 for place in range(response)]).long()
    nested = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    positions = nested([torch.arange(len(row)) for row in rows])
    return {
        "input_ids": nested(rows),
        "position_ids": positions,
        "attention_mask": attention,
        "loss_mask": loss_mask,
        "temperature": temperature,
    }


def everywhere(model: Any, values: dict[str, Any], row: int) -> tuple[Any, Any, Any]:
    """Log-probabilities and entropies of all tokens of a row, and where the next one is trained."""
    tokens = values["input_ids"].unbind()[row]
    log_probs = (model(tokens[None]).logits[0].float() / values["temperature"]).log_softmax(-1)
    prompt = int(values["attention_mask"][row, :PROMPT].sum())
    trained = torch.zeros(len(tokens), dtype=torch.bool)
    trained[prompt - 1 : -1] = values["loss_mask"][row, : len(tokens) - prompt].bool()
    chosen = log_probs.gather(-1, torch.roll(tokens, -1)[:, None])[:, 0]
    return chosen, -(log_probs.exp() * log_probs).sum(-1), trained


@pytest.mark.parametrize("chunk", [3, 512])
@pytest.mark.parametrize("lengths", [[(5, 8)], [(4, 8), (5, 3)], [(2, 6), (2, 6)]], ids=str)
def test_trained_tokens_have_the_figures_of_the_whole_sequence_and_others_are_zero(
    model: Any, lengths: list[tuple[int, int]], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_engine, "CHUNK", chunk)
    values = batch(lengths, temperature=0.7)
    log_probs, entropies = trained_log_probs(model, values, train_entropy=False)
    assert log_probs.requires_grad
    assert not entropies.requires_grad
    for row, (log_prob, entropy) in enumerate(zip(log_probs.unbind(), entropies.unbind(), strict=True)):
        wanted, uncertain, trained = everywhere(model, values, row)
        assert torch.allclose(log_prob[trained], wanted[trained], atol=1e-5)
        assert torch.allclose(entropy[trained], uncertain[trained], atol=1e-5)
        assert not log_prob[~trained].any()


@pytest.mark.parametrize("train_entropy", [False, True])
def test_gradients_are_those_of_the_whole_sequence(model: Any, train_entropy: bool) -> None:
    values = batch([(4, 7)])

    def gradients(log_probs: Any, entropies: Any) -> list[Any]:
        model.zero_grad()
        (log_probs.sum() + (entropies.sum() if train_entropy else 0.0)).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    log_probs, entropies = trained_log_probs(model, values, train_entropy=train_entropy)
    ours = gradients(log_probs.values(), entropies.values())
    chosen, uncertain, trained = everywhere(model, values, 0)
    theirs = gradients(chosen[trained], uncertain[trained])
    assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(ours, theirs, strict=True))


@pytest.fixture
def one_rank(tmp_path: Path) -> Any:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("advantages", "entropy_coeff", "rows"),
    [
        ([0.0, 1.0, 0.0, -1.0], 0.0, [1, 3]),
        ([0.0, 1.0, 0.0, 0.0], 0.0, [0, 1]),  # a micro batch is filled
        ([0.0, 0.0, 0.0, 0.0], 0.0, [0, 1]),  # VERL needs one
        ([0.0, 1.0, 0.0, -1.0], 0.1, [0, 1, 2, 3]),  # an entropy bonus teaches every row
    ],
)
def test_rows_without_an_advantage_are_not_computed(
    one_rank: Any, advantages: list[float], entropy_coeff: float, rows: list[int]
) -> None:
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    seen: list[int] = []

    def original(engine: Any, data: Any, loss_function: Any, forward_only: bool) -> None:
        seen.extend(data["number"].tolist())

    data = TensorDict(
        {
            "number": torch.arange(4),
            "loss_mask": torch.ones(4, RESPONSE),
            "advantages": torch.tensor(advantages)[:, None].expand(4, RESPONSE),
        },
        batch_size=[4],
    )
    tu.assign_non_tensor(data, micro_batch_size_per_gpu=2)
    module = types.SimpleNamespace(torch=torch, tu=tu)
    engine = types.SimpleNamespace(get_data_parallel_group=lambda: one_rank)
    loss = functools.partial(print, config=types.SimpleNamespace(entropy_coeff=entropy_coeff))
    actor_engine._without_flat_rows(module, original)(engine, data, loss)
    assert seen == rows
