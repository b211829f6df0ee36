"""`python run_pipeline.py package`: GGUF files with a Modelfile for Ollama and a model card, or a push to a hub."""

from __future__ import annotations

import argparse
from pathlib import Path

from shared.agent.prompts import prompts_of
from shared.cli.command_line import check_name
from shared.config.load import load_config
from shared.config.schema import Config
from shared.errors import UserError
from shared.models.chat_template import ChatTemplate
from shared.models.folder import check_model_folder, publish
from shared.models.tokenizer import Tokenizer
from shared.packaging.hub import check_target, push
from shared.packaging.model_card import model_card
from shared.runs.output_paths import refuse_overwriting
from shared.serving.answering import newest_model, trained_with

_PROBES = (
    "How many customers are there?",
    "List the names of all products.",
    "Which city has the most orders?",
    "What is the average price per category?",
)
_MODELFILE = """FROM ./{weights}
PARAMETER num_ctx {context}
PARAMETER temperature 0
PARAMETER stop <|im_end|>
TEMPLATE \"\"\"{template}\"\"\"
"""


def package(args: argparse.Namespace) -> None:
    """Do what the command line names."""
    config = load_config(args.config, args.profile, args.overrides)
    if args.run_name:
        check_name("--run-name", args.run_name)
    model = args.model or newest_model(Path(config.runs_dir).resolve(), args.run_name or "*")
    if model is None:
        where = Path(config.runs_dir) / (args.run_name or "")
        raise UserError(f"{where} holds no trained model; run the pipeline first, or give --model FOLDER.")
    check_model_folder(model, "the model")
    if args.to == "hub":
        repo, card = check_target(args.repo), model_card(model)
        files = sorted(file.name for file in model.iterdir() if file.name != "README.md")
        if args.dry_run:
            print(f"would push {', '.join(files)} and a model card to {repo}")
        else:
            print(f"pushed {model} to {push(model, card, repo, public=args.public)}")
        return
    target = args.out or model.resolve().parent.parent / "package"
    refuse_overwriting([target], [model])
    if target.exists() and not (target / "Modelfile").exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--out {target} holds something else than a package; choose another folder.")
    names = {precision: f"{model.resolve().parent.parent.name}-{precision}.gguf" for precision in ("f16", "q8_0")}
    if args.dry_run:
        print(f"model {model}\nwrites {target}: {', '.join(names.values())}, Modelfile, README.md")
        return
    make_files(trained_with(model, args), model, target, names)


def make_files(config: Config, model: Path, target: Path, names: dict[str, str]) -> None:
    """Fill `target`: one GGUF file per precision, verified against the checkpoint, a Modelfile and the model card.

    `config` holds the settings that the model was trained with. Raises UserError, and leaves an older package in its
    place, when a file's greedy tokens are not the checkpoint's.
    """
    from shared.packaging.gguf_file import LEAST_AGREEMENT, agreement, greedy_tokens, write_gguf

    card = model_card(model)
    prompts = _probe_prompts(config, model)
    with publish(target) as partial:
        written = greedy_tokens(model, prompts)
        figures = []
        for precision, name in names.items():
            write_gguf(model, partial / name, precision)
            same = agreement(partial / name, prompts, written)
            size = (partial / name).stat().st_size / 1e6
            figures.append(
                f"{name}: {size:.0f} MB, {same:.1%} of {sum(map(len, written))} greedy tokens as the checkpoint"
            )
            print(figures[-1], flush=True)
            if same < LEAST_AGREEMENT[precision]:
                raise UserError(
                    f"{name} chooses {same:.1%} of the checkpoint's greedy tokens (at least "
                    f"{LEAST_AGREEMENT[precision]:.0%} are demanded), so it is not kept; use the checkpoint itself."
                )
        template = (Path(__file__).parent / "ollama.gotmpl").read_text(encoding="utf-8").rstrip("\n") + "\n"
        text = _MODELFILE.format(weights=names["q8_0"], context=config.agent.context_tokens, template=template)
        (partial / "Modelfile").write_text(text, encoding="utf-8")
        listed = "\n".join(f"- {figure}" for figure in figures)
        (partial / "README.md").write_text(f"{card}\n## GGUF files\n\n{listed}\n", encoding="utf-8")
    print(f"package: {target}\nwith Ollama: ollama create {target.parent.name} -f {target / 'Modelfile'}")


def _probe_prompts(config: Config, model: Path) -> list[list[int]]:
    """Token ids of the first prompts of four questions."""
    template, tokenizer, prompts = (
        ChatTemplate.from_folder(model),
        Tokenizer.from_folder(model),
        prompts_of(config.agent),
    )
    return [
        tokenizer.encode(template.render(prompts.opening(question), prompts.tools, prompt=True)) for question in _PROBES
    ]
