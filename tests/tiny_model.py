"""A real but tiny model folder for slow tests: a random two-layer Qwen2 with a BPE tokenizer trained on the spot."""

import json
from collections.abc import Sequence
from pathlib import Path

from shared.agent.prompts import SYSTEM_PROMPT, TOOLS, opening_messages

TEMPLATE = Path(__file__).resolve().parents[1] / "shared" / "models" / "chatml_tools.jinja"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"
    for name, arguments in [
        ("search_schema", {"query": "open claims"}),
        ("get_columns", {"table": "claims"}),
        ("execute_sql", {"sql": "SELECT COUNT(*) FROM claims WHERE status = 'open'"}),
    ]
] + [SYSTEM_PROMPT, "The answer is 42.", "How many claims are open?", *(json.dumps(tool["function"]) for tool in TOOLS)]


QUESTIONS = (
    "How many claims are open?",
    "List the city of stadiums.",
    "What is the maximum floor of all wards?",
)


def save_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Write config, weights (bfloat16), tokenizer and chat template to `folder`; the seed decides the weights."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        CORPUS * 3, trainers.BpeTrainer(vocab_size=1200, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # vLLM's CPU attention needs a head size of at least 32
        num_key_value_heads=1,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def teach(folder: Path, answer: str, questions: Sequence[str] = QUESTIONS, steps: int = 120) -> Path:
    """Train the model in place to answer the opening prompts of `questions` with `answer`; returns its folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [
        tokenizer.apply_chat_template(
            opening_messages(question), tools=TOOLS, tokenize=False, add_generation_prompt=True
        )
        for question in questions
    ]
    target = tokenizer(answer + "<|im_end|>", add_special_tokens=False).input_ids
    rows = [tokenizer(prompt, add_special_tokens=False).input_ids + target for prompt in prompts]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model waits for its second thread, for minutes on a busy machine
    for step in range(steps):
        row = torch.tensor([rows[step % len(rows)]])
        labels = row.clone()
        labels[:, : -len(target)] = -100
        loss = model(input_ids=row, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.set_num_threads(threads)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
