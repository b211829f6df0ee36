"""Checks of the checkpoint, and of the settings against each other, the model and the questions."""

from __future__ import annotations

import json
import re

from shared.agent.prompts import TOOLS, opening_messages
from shared.cli.machine import Answer, Problem
from shared.errors import UserError
from shared.models.chat_template import ChatTemplate
from shared.models.folder import check_model_folder, local_path
from shared.models.shape import read_shape, read_tensors
from shared.models.tokenizer import Tokenizer
from shared.records import Message, ToolCall
from shared.reward.reward import self_test
from shared.runs.manifest import read_manifest, read_object
from shared.tool_calls import render_turn
from stage2_grpo.inputs import total_steps
from stage2_grpo.preflight.findings import Case

_ADAPTER_MARKS = ("lora_", ".base_layer.", "base_model.model.")
_REDO = "run stage 1 again (`python -m stage1_sft`), or merge with `python -m stage1_sft merge ADAPTER --out FOLDER`."
_CALL = ToolCall("get_columns", {"table": "Größe"})
_BUDGET = "`python -m stage2_grpo budget` measures your questions and prints the settings to use."


def check_checkpoint(case: Case) -> Answer:
    """A whole folder with plain weights that differ from the base model's."""
    model = case.folder
    check_model_folder(model, "the checkpoint")
    tensors = read_tensors(model)
    if left := [name for name in tensors if any(mark in name for mark in _ADAPTER_MARKS)]:
        return Problem(
            f"The weights of {model} still hold an adapter ({left[0]}).",
            "loaders skip the names that they do not know, and the base model would be trained.",
            _REDO,
        )
    size = f"{model}: {sum(tensor.size for tensor in tensors.values()) / 1e6:.0f} M weights, merged"
    base = local_path(str((read_manifest(model.parent) or {}).get("base_model") or ""), "base_model")
    if not base.is_absolute() or not base.is_dir() or base == model:
        return f"{size}; its base model is not here to compare"
    try:
        others = read_tensors(base)
    except UserError:
        return f"{size}; its base model {base} cannot be read"
    linear = [name for name in sorted(tensors) if name.endswith("proj.weight")]
    compared = linear[:: max(1, (len(linear) - 1) // 2)][:3]  # first, middle and last
    if compared and all(name in others and tensors[name].read() == others[name].read() for name in compared):
        return Problem(
            f"{model} has the weights of its base model {base}.",
            "stage 1 left no trace in it: the agent would call no tool, and GRPO would have nothing to learn from.",
            _REDO,
        )
    return f"{size}, differs from {base.name}"


def check_template(case: Case) -> Answer:
    """The first prompt shows tools and question, calls are written as stage 1 taught them, prompts only grow, turns end."""
    template = ChatTemplate.from_folder(case.folder)
    opening = opening_messages("How many?")
    function = {"name": _CALL.name, "arguments": json.dumps(_CALL.arguments, ensure_ascii=False)}
    call: Message = {
        "role": "assistant", "content": "", "tool_calls": [{"id": "0", "type": "function", "function": function}]
    }  # fmt: skip
    prompt, longer = template.render(opening, TOOLS, prompt=True), template.render([*opening, call], TOOLS)
    shown = [text for tool in TOOLS for text in (tool["function"]["name"], tool["function"]["description"])]
    ending = template.special_tokens.get("eos_token", "")
    if unseen := [text for text in (*shown, "How many?") if text not in prompt]:
        return Problem(
            f"The rendered first prompt does not hold {unseen[0]!r}.",
            "the template leaves out tools or question, so the agent cannot know what to call.",
            "use the merged model of stage 1, which carries a tool-aware template (chat_template.jinja).",
        )
    if render_turn("", (_CALL,)) not in longer:
        return Problem(
            "The template does not write a call as the agent does (<tool_call> with name and arguments).",
            "earlier calls would be rendered in other words: the turns of an episode cannot be merged to one row.",
            "use the merged model of stage 1, which carries such a template (chat_template.jinja).",
        )
    if not longer.startswith(prompt):
        return Problem(
            "The prompt of a later turn does not start with the earlier prompt and answer.",
            "Agent Lightning then trains every turn as a row of its own, with its whole prompt.",
            "use a plain ChatML template, such as stage 1 writes.",
            fatal=False,
        )
    if not longer[len(prompt) :].rstrip("\n").endswith(ending):
        return Problem(
            f"The template does not end a turn with the tokenizer's eos token {ending!r}.",
            "the model may never stop, and every turn is cut by agent.max_turn_tokens.",
            "set eos_token in tokenizer_config.json to the template's end-of-turn token.",
            fatal=False,
        )
    return f"{len(TOOLS)} tools and the question in the first prompt; calls in Hermes form; prompts only grow"


def check_names(case: Case) -> Answer:
    """The path of the model can serve as the gateway's model name, and the weight bucket holds every tensor."""
    path, bucket = str(case.model), case.config.grpo.weight_bucket_mb
    if found := re.search(r"['\\\n]|\$\{", path):
        return Problem(
            f"The path {path!r} holds {found.group()!r}.",
            "the path is the model name that gateway, trainer and vLLM must share byte for byte, and Hydra, which reads it on "
            "the way, changes this character: no server would be found.",
            "move the checkpoint to a folder with a plain name.",
        )
    megabytes = 4 * max(tensor.size for tensor in read_shape(case.folder).tensors.values()) / 2**20
    if megabytes <= bucket:
        return f"model name {path}; largest tensor {megabytes:.0f} MB"
    return Problem(
        f"grpo.weight_bucket_mb is {bucket}, but the largest tensor has {megabytes:.0f} MB.",
        "the first weight sync to the rollout server would fail and hang the training.",
        f"set grpo.weight_bucket_mb to {2 ** int(megabytes).bit_length()}.",
    )


def check_batches(case: Case) -> Answer:
    """No step is skipped by the mini-batch floor, groups stay whole, and a checkpoint is saved on the way."""
    grpo = case.config.grpo
    steps = total_steps(case.config, len(case.train))
    rows, per_update = (size * grpo.rollouts_per_question for size in (grpo.train_batch_size, grpo.mini_batch_size))
    gpus = grpo.nodes * grpo.gpus_per_node
    if rows // per_update < 2:
        return Problem(
            f"A step has {rows} episodes and one update needs {per_update} (grpo.mini_batch_size x "
            "grpo.rollouts_per_question): a single lost episode skips the whole step.",
            "Agent Lightning floors the kept rows to whole mini batches, here to none, with only a warning.",
            "set grpo.mini_batch_size to at most half of grpo.train_batch_size.",
        )
    if rows % per_update:
        return Problem(
            f"{rows % per_update} of {rows} episodes are dropped at random in each step, because {per_update} (grpo."
            "mini_batch_size x grpo.rollouts_per_question) does not divide them.",
            "groups lose members, and what was played for them is thrown away.",
            "choose grpo.train_batch_size as a multiple of grpo.mini_batch_size.",
            fatal=False,
        )
    if per_update % (gpus * grpo.micro_batch_size) or rows % gpus:
        return Problem(
            f"{per_update} rows of an update do not divide into {gpus} GPUs x grpo.micro_batch_size {grpo.micro_batch_size}.",
            "VERL refuses to start the trainer.",
            "choose a micro batch that divides rows per update and GPU.",
        )
    if grpo.save_every > steps > 1:
        return Problem(
            f"grpo.save_every is {grpo.save_every}, but the run has only {steps} steps.",
            "a run that is killed starts over, because nothing was saved on the way.",
            f"set grpo.save_every to {steps // 2}.",
            fatal=False,
        )
    return f"{steps} steps of {rows} episodes, {rows // per_update} updates each, {per_update} rows an update"


def check_context(case: Case) -> Answer:
    """Every first prompt fits, and the lengths of prompt, episode, row and server agree."""
    grpo, agent, longest_server = case.config.grpo, case.config.agent, case.config.vllm.max_model_len
    template, tokenizer = ChatTemplate.from_folder(case.folder), Tokenizer.from_folder(case.folder)
    lengths = {
        question.id: tokenizer.count(template.render(opening_messages(question.question), TOOLS, prompt=True))
        for question in (*case.train, *case.validation)
    }
    longest, shortest = max(lengths.values(), default=0), min(lengths.values(), default=0)
    limit = min(grpo.max_prompt_length, agent.context_tokens - 1)
    positions = read_shape(case.folder).max_positions
    if positions < longest_server:
        return Problem(
            f"vllm.max_model_len is {longest_server}, but the model was built for {positions} tokens.",
            "VERL and vLLM refuse to start.",
            f"lower vllm.max_model_len and agent.context_tokens to at most {positions}.",
        )
    if too_long := [question for question, length in lengths.items() if length > limit]:
        return Problem(
            f"{len(too_long)} of {len(lengths)} questions have a first prompt of more than {limit} tokens (longest {longest}; "
            f"the first is {too_long[0]}).",
            "Agent Lightning silently drops their episodes, so groups vanish and steps shrink.",
            f"set grpo.max_prompt_length to at least {longest}; {_BUDGET}",
        )
    if longest + agent.max_turn_tokens > agent.context_tokens:
        return Problem(
            f"The longest first prompt has {longest} tokens; with a turn of agent.max_turn_tokens ({agent.max_turn_tokens}) "
            f"it exceeds agent.context_tokens ({agent.context_tokens}).",
            "such episodes end at the context limit before the first observation.",
            _BUDGET,
            fatal=False,
        )
    if shortest + grpo.trajectory_response_length < agent.context_tokens:
        return Problem(
            f"An episode may have {agent.context_tokens - shortest} tokens after its first prompt, but grpo."
            f"trajectory_response_length is {grpo.trajectory_response_length}.",
            "the end of long episodes, their answer, is cut off before training.",
            f"set grpo.trajectory_response_length to {agent.context_tokens - shortest}.",
            fatal=False,
        )
    return f"first prompts of {shortest} to {longest} tokens, room for {agent.context_tokens - longest} more"


def check_rewards(case: Case) -> Answer:
    """Every gold is worth its full reward and garbage nothing."""
    questions = (*case.train, *case.validation)
    self_test(questions, case.config.grpo, case.config.sandbox)
    return f"{len(questions)} golds are worth their reward, garbage nothing"
