"""Checks of the checkpoint, and of the settings against each other, the model and the questions."""

from __future__ import annotations

import json
import re

from shared.agent.prompts import prompts_of
from shared.cli.machine import Drawback
from shared.errors import UserError
from shared.models.chat_template import ChatTemplate
from shared.models.folder import check_model_folder, local_path
from shared.models.shape import read_shape, read_tensors
from shared.models.tokenizer import Tokenizer
from shared.records import Message, ToolCall
from shared.reward.reward import self_test
from shared.runs.manifest import read_manifest, read_object
from shared.tool_calls import render_turn
from stage2_grpo.inputs import fit_to_questions, total_steps
from stage2_grpo.preflight.findings import Case

_ADAPTER_MARKS = ("lora_", ".base_layer.", "base_model.model.")
_REDO = "run stage 1 again (`python -m stage1_sft`), or merge with `python -m stage1_sft merge ADAPTER --out FOLDER`"
_TEMPLATE = "use the merged model of stage 1, which carries a plain, tool-aware ChatML template"
_CALL = ToolCall("get_columns", {"table": "Größe"})
_BUDGET = "`python -m stage2_grpo budget` prints the settings for your questions"


def check_checkpoint(case: Case) -> str:
    """A whole folder with plain weights that differ from the base model's."""
    model = case.folder
    check_model_folder(model, "the checkpoint")
    tensors = read_tensors(model)
    if left := [name for name in tensors if any(mark in name for mark in _ADAPTER_MARKS)]:
        raise UserError(
            f"The weights of {model} still hold an adapter ({left[0]}), whose names loaders skip, so the base model "
            f"would be trained; {_REDO}."
        )
    size = f"{model}: {sum(tensor.size for tensor in tensors.values()) / 1e6:.0f} M weights, merged"
    base = local_path(str((read_manifest(model.parent) or {}).get("base_model") or ""), "base_model")
    if not base.is_absolute() or not base.is_dir() or base == model:
        return f"{size}; its base model is not here to compare"
    others = read_tensors(base)
    linear = [name for name in sorted(tensors) if name.endswith("proj.weight")]
    compared = linear[:: max(1, (len(linear) - 1) // 2)][:3]  # first, middle and last
    if compared and all(name in others and tensors[name].read() == others[name].read() for name in compared):
        raise UserError(
            f"{model} has the weights of its base model {base}: stage 1 left no trace in it, so the agent would call "
            f"no tool and GRPO have nothing to learn from; {_REDO}."
        )
    return f"{size}, differs from {base.name}"


def check_template(case: Case) -> str:
    """The first prompt shows tools and question, calls have the form of stage 1, prompts only grow, turns end."""
    template = ChatTemplate.from_folder(case.folder)
    prompts = prompts_of(case.config.agent)
    opening, tools = prompts.opening("How many?"), prompts.tools
    function = {"name": _CALL.name, "arguments": json.dumps(_CALL.arguments, ensure_ascii=False)}
    call: Message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    prompt, longer = template.render(opening, tools, prompt=True), template.render([*opening, call], tools)
    shown = [tool["function"][key] for tool in tools for key in ("name", "description")]
    ending = template.special_tokens.get("eos_token", "")
    if unseen := [text for text in (*shown, "How many?") if text not in prompt]:
        raise UserError(
            f"The rendered first prompt does not hold {unseen[0]!r}, so the agent cannot know what to call; "
            f"{_TEMPLATE}."
        )
    if render_turn("", (_CALL,)) not in longer:
        raise UserError(
            "The template does not write a call as the agent does (<tool_call> with name and arguments), so the turns "
            f"of an episode cannot be merged to one row; {_TEMPLATE}."
        )
    if not longer.startswith(prompt):
        raise Drawback(
            "The prompt of a later turn does not start with the earlier prompt and answer, so every turn is trained as "
            f"a row of its own, with its whole prompt; {_TEMPLATE}."
        )
    if not longer[len(prompt) :].rstrip("\n").endswith(ending):
        raise Drawback(
            f"The template does not end a turn with the tokenizer's eos token {ending!r}, so the model may never stop; "
            "set eos_token in tokenizer_config.json to the template's end-of-turn token."
        )
    ids = Tokenizer.from_folder(case.folder).encode(ending)
    for file in ("config.json", "generation_config.json"):  # those of a base model often end a document, not a turn
        named = read_object(case.folder / file).get("eos_token_id")
        if named is not None and len(ids) == 1 and ids[0] not in (named if isinstance(named, list) else [named]):
            raise Drawback(
                f"{file} names the eos token id {named}, but turns end with {ending!r} ({ids[0]}), so what reads that "
                f"file does not stop there; set its eos_token_id to {ids[0]}, or run stage 1 again."
            )
    return f"{len(tools)} tools and the question in the first prompt; calls in Hermes form; prompts only grow"


def check_names(case: Case) -> str:
    """The path of the model can serve as the gateway's model name, and the weight bucket holds every tensor."""
    path, bucket = str(case.model), case.config.grpo.weight_bucket_mb
    if found := re.search(r"['\\\n]|\$\{", path):
        raise UserError(
            f"The path {path!r} holds {found.group()!r}, which Hydra changes on the way, so that gateway, trainer and "
            "vLLM would not share it as the model's name; move the checkpoint to a folder with a plain name."
        )
    megabytes = 4 * max(tensor.size for tensor in read_shape(case.folder).tensors.values()) / 2**20
    if megabytes > bucket:
        raise UserError(
            f"grpo.weight_bucket_mb is {bucket}, but the largest tensor has {megabytes:.0f} MB, so the first weight "
            f"sync would fail and hang the training; set it to {2 ** int(megabytes).bit_length()}."
        )
    return f"model name {path}; largest tensor {megabytes:.0f} MB"


def check_batches(case: Case) -> str:
    """No step is skipped by the mini-batch floor, groups stay whole, and a checkpoint is saved on the way."""
    fit = fit_to_questions(case.config, len(case.train))
    grpo, steps = fit.grpo, total_steps(fit, len(case.train))
    rows, update = (size * grpo.rollouts_per_question for size in (grpo.train_batch_size, grpo.mini_batch_size))
    gpus = grpo.nodes * grpo.gpus_per_node
    if rows // update < 2:
        raise UserError(
            f"A step has {rows} episodes and one update takes {update} (grpo.mini_batch_size x "
            "grpo.rollouts_per_question), so a single lost episode skips the whole step; set grpo.mini_batch_size to "
            "at most half of grpo.train_batch_size."
        )
    if rows % update:
        raise Drawback(
            f"{rows % update} of {rows} episodes are dropped at random in each step, because {update} "
            "(grpo.mini_batch_size x grpo.rollouts_per_question) does not divide them; make grpo.train_batch_size a "
            "multiple of grpo.mini_batch_size."
        )
    if update % (gpus * grpo.micro_batch_size) or rows % gpus:
        raise UserError(
            f"{update} rows of an update do not divide into {gpus} GPUs x grpo.micro_batch_size "
            f"{grpo.micro_batch_size}, and VERL refuses that; choose a micro batch that divides them."
        )
    if grpo.save_every > steps > 1:
        raise Drawback(
            f"grpo.save_every is {grpo.save_every}, but the run has only {steps} steps, so a killed run starts over; "
            f"set it to {steps // 2}."
        )
    return f"{steps} steps of {rows} episodes, {rows // update} updates each, {update} rows an update"


def check_context(case: Case) -> str:
    """Every first prompt fits, and the lengths of prompt, episode, row and server agree."""
    agent = case.config.agent
    template, tokenizer = ChatTemplate.from_folder(case.folder), Tokenizer.from_folder(case.folder)
    prompts = prompts_of(agent)
    lengths = {
        question.id: tokenizer.count(template.render(prompts.opening(question.question), prompts.tools, prompt=True))
        for question in (*case.train, *case.validation)
    }
    longest, shortest = max(lengths.values(), default=0), min(lengths.values(), default=0)
    limit, positions = agent.context_tokens - 1, read_shape(case.folder).max_positions
    if positions < agent.context_tokens:
        raise UserError(
            f"agent.context_tokens is {agent.context_tokens}, but the model was built for {positions} tokens, so VERL "
            f"and vLLM refuse to start; lower it to at most {positions}."
        )
    if too_long := [question for question, length in lengths.items() if length > limit]:
        raise UserError(
            f"{len(too_long)} of {len(lengths)} questions have a first prompt of more than {limit} tokens (longest "
            f"{longest}; the first is {too_long[0]}), and Agent Lightning silently drops their episodes; raise "
            f"agent.context_tokens above {longest} ({_BUDGET})."
        )
    if longest + agent.max_turn_tokens > agent.context_tokens:
        raise Drawback(
            f"The longest first prompt has {longest} tokens; with a turn of agent.max_turn_tokens "
            f"({agent.max_turn_tokens}) it exceeds agent.context_tokens ({agent.context_tokens}), so its episode ends "
            f"before the first observation; {_BUDGET}."
        )
    return f"first prompts of {shortest} to {longest} tokens, room for {agent.context_tokens - longest} more"


def check_rewards(case: Case) -> str:
    """Every gold is worth its full reward and garbage nothing."""
    questions = (*case.train, *case.validation)
    self_test(questions, case.config.grpo, case.config.sandbox)
    return f"{len(questions)} golds are worth their reward, garbage nothing"
