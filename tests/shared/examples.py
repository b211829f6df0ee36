"""Small real things the tests of shared/ work on: an insurance database, a tokenizer, settings."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from shared.config.schema import SandboxConfig
from shared.models.tokenizer import Tokenizer
from shared.sql.database import Database

LIMITS = SandboxConfig(timeout_seconds=0.5, max_rows=20, max_compare_rows=1000, max_result_bytes=100_000)

SCHEMA = """
CREATE TABLE customers (customer_id INTEGER PRIMARY KEY, full_name TEXT NOT NULL, city TEXT);
CREATE TABLE policies (policy_id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers, kind TEXT,
  premium REAL);
CREATE TABLE claims (claim_id INTEGER PRIMARY KEY, policy_id INTEGER REFERENCES policies(policy_id), amount REAL,
                     filed_on TEXT, note TEXT);
INSERT INTO customers VALUES (1, 'Ann O''Hara', 'Bern'), (2, 'Bo Li', 'Oslo'), (3, 'Cleo Diaz', NULL);
INSERT INTO policies VALUES (1, 1, 'car', 300.5), (2, 1, 'home', 120.0), (3, 2, 'car', 280.0);
INSERT INTO claims VALUES (1, 1, 120.5, '2024-01-03', NULL), (2, 1, 88.0, '2024-02-11', 'hail'),
                          (3, 3, 940.25, '2024-02-20', 'rear bumper, two witnesses and a very long story about it');
"""


def insurance_file(folder: Path, extra: str = "") -> Path:
    """A database of three tables; `extra` is SQL run after the usual rows."""
    path = folder / "insurance.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"PRAGMA synchronous = OFF; BEGIN; {SCHEMA} COMMIT; {extra}")
    return path


def insurance(folder: Path, extra: str = "", limits: SandboxConfig = LIMITS) -> Database:
    return Database(insurance_file(folder, extra), limits)


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE with a few merges."""
    return Tokenizer(_byte_pairs())


def tokenizer_folder(folder: Path) -> Path:
    _byte_pairs().save(str(folder / "tokenizer.json"))
    return folder


def _byte_pairs() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(_trained())


@cache
def _trained() -> str:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([SCHEMA, "SELECT amount FROM claims WHERE amount > 100 ORDER BY amount"], trainer)
    return str(inner.to_str())
