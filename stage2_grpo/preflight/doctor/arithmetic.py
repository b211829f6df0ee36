"""The settings against each other and against the data: steps, batches, checkpoints, context, names, rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shared.agent.prompts import TOOLS, opening_messages
from shared.errors import UserError
from shared.models.chat_template import ChatTemplate
from shared.models.shape import read_shape
from shared.models.tokenizer import Tokenizer
from shared.reward import reward
from stage2_grpo.inputs import total_steps
from stage2_grpo.preflight.doctor.findings import Case, Finding, error, ok, warning

_BUDGET = "`python -m stage2_grpo budget` measures your questions and prints the settings to use."


def check_batches(case: Case) -> Iterator[Finding]:
    """No step is skipped by the mini-batch floor, groups stay whole, and there is a checkpoint before the end."""
    grpo, name = case.config.grpo, "batches"
    try:
        steps = total_steps(case.config, len(case.train))
    except UserError as problem:
        yield error(
            name, str(problem), why="not one step could be made as planned.", fix="change the settings it names."
        )
        return
    rows, per_update = (size * grpo.rollouts_per_question for size in (grpo.train_batch_size, grpo.mini_batch_size))
    gpus = grpo.nodes * grpo.gpus_per_node
    if rows // per_update < 2:
        yield error(
            name,
            f"A step has {rows} episodes and one update needs {per_update} (grpo.mini_batch_size x "
            "grpo.rollouts_per_question): a single lost episode skips the whole step.",
            why="Agent Lightning floors the kept rows to whole mini batches, here to none, with only a warning.",
            fix="set grpo.mini_batch_size to at most half of grpo.train_batch_size.",
        )
    elif rows % per_update:
        yield warning(
            name,
            f"{rows % per_update} of {rows} episodes are dropped at random in each step, because {per_update} (grpo."
            "mini_batch_size x grpo.rollouts_per_question) does not divide them.",
            why="groups lose members, and what was played for them is thrown away.",
            fix="choose grpo.train_batch_size as a multiple of grpo.mini_batch_size.",
        )
    elif per_update % (gpus * grpo.micro_batch_size) or rows % gpus:
        yield error(
            name,
            f"{per_update} rows of an update do not divide into {gpus} GPUs x grpo.micro_batch_size {grpo.micro_batch_size}.",
            why="VERL refuses to start the trainer.",
            fix="choose a micro batch that divides rows per update and GPU.",
        )
    elif grpo.save_every > steps and steps > 1:
        yield warning(
            name,
            f"grpo.save_every is {grpo.save_every}, but the run has only {steps} steps.",
            why="a run that is killed starts over, because nothing was saved on the way.",
            fix=f"set grpo.save_every to {max(1, steps // 2)}.",
        )
    else:
        yield ok(
            name, f"{steps} steps of {rows} episodes, {rows // per_update} updates each, {per_update} rows an update"
        )


def check_context(case: Case) -> Iterator[Finding]:
    """Every first prompt fits, and the lengths of prompt, episode, row and server agree."""
    if case.model is None:
        return
    config, name = case.config, "context"
    grpo, agent = config.grpo, config.agent
    lengths = first_prompts(case)
    longest, shortest = max(lengths.values(), default=0), min(lengths.values(), default=0)
    limit = min(grpo.max_prompt_length, agent.context_tokens - 1)
    too_long = [question for question, length in lengths.items() if length > limit]
    positions = read_shape(case.model).max_positions
    if positions < config.vllm.max_model_len:
        yield error(
            name,
            f"vllm.max_model_len is {config.vllm.max_model_len}, but the model was built for {positions} tokens.",
            why="VERL and vLLM refuse to start.",
            fix=f"lower vllm.max_model_len and agent.context_tokens to at most {positions}.",
        )
    if too_long:
        yield error(
            name,
            f"{len(too_long)} of {len(lengths)} questions have a first prompt of more than {limit} tokens (longest "
            f"{longest}; the first is {too_long[0]}).",
            why="Agent Lightning drops each of their episodes, so groups vanish and steps shrink without a word.",
            fix=f"set grpo.max_prompt_length to at least {longest}; {_BUDGET}",
        )
    elif longest + agent.max_turn_tokens > agent.context_tokens:
        yield warning(
            name,
            f"The longest first prompt has {longest} tokens; with a turn of agent.max_turn_tokens ({agent.max_turn_tokens}) "
            f"it exceeds agent.context_tokens ({agent.context_tokens}).",
            why="such episodes end at the context limit before the first observation.",
            fix=_BUDGET,
        )
    elif shortest + grpo.trajectory_response_length < agent.context_tokens:
        yield warning(
            name,
            f"An episode may have {agent.context_tokens - shortest} tokens after its first prompt, but grpo."
            f"trajectory_response_length is {grpo.trajectory_response_length}.",
            why="the end of long episodes, their answer, is cut off before training.",
            fix=f"set grpo.trajectory_response_length to {agent.context_tokens - shortest}.",
        )
    elif positions >= config.vllm.max_model_len:
        yield ok(
            name, f"first prompts of {shortest} to {longest} tokens, room for {agent.context_tokens - longest} more"
        )


def first_prompts(case: Case) -> dict[str, int]:
    """Tokens of the opening prompt of each training and validation question, by its id."""
    assert case.model is not None
    template, tokenizer = ChatTemplate.from_folder(case.model), Tokenizer.from_folder(case.model)
    prompts = {
        question.id: template.render(opening_messages(question.question), TOOLS, prompt=True)
        for question in (*case.train, *case.validation)
    }
    return {question: tokenizer.count(prompt) for question, prompt in prompts.items()}


def check_names(case: Case) -> Iterator[Finding]:
    """The path of the checkpoint can travel as the gateway's model name, and the weight bucket holds every tensor."""
    if case.model is None:
        return
    path, name = str(case.model), "names"
    if found := re.search(r"['\\\n]|\$\{", path):
        yield error(
            name,
            f"The path {path!r} holds {found.group()!r}.",
            why="the path is the model name that gateway, trainer and vLLM must share byte for byte, and Hydra, which reads "
            "it on the way, changes this character: no server would be found.",
            fix="move the checkpoint to a folder with a plain name.",
        )
        return
    megabytes = 4 * read_shape(case.model).largest_tensor / 2**20
    if megabytes > case.config.grpo.weight_bucket_mb:
        yield error(
            name,
            f"grpo.weight_bucket_mb is {case.config.grpo.weight_bucket_mb}, but the largest tensor has {megabytes:.0f} MB.",
            why="the first weight sync to the rollout server would fail and hang the training.",
            fix=f"set grpo.weight_bucket_mb to {2 ** (int(megabytes).bit_length())}.",
        )
    else:
        yield ok(name, f"model name {path}; largest tensor {megabytes:.0f} MB")


def check_rewards(case: Case) -> Iterator[Finding]:
    """Every gold is worth its full reward and garbage nothing."""
    name, questions = "rewards", (*case.train, *case.validation)
    try:
        reward.self_test(questions, case.config.grpo, case.config.sandbox)
    except UserError as problem:
        yield error(
            name,
            str(problem),
            why="a wrong reward trains the wrong thing, and nothing later would show it.",
            fix="correct the gold SQL or the database, or leave the question out.",
        )
    else:
        yield ok(name, f"{len(questions)} golds are worth their reward, garbage nothing")
