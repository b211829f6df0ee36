"""`python -m shared.evaluation`: evaluate a model or an endpoint on a run's questions, or check our judges.

`--model FOLDER` evaluates any model folder or LoRA adapter, `--endpoint URL --tokenizer FOLDER` any endpoint (its key
in FIRSTCALL_API_KEY); `--split val` or `--questions FILE` asks other questions than the test split;
`--verdicts CASES --databases FOLDER` compares the official judges of shared/evaluation/judges/ with recorded verdicts.
"""

from __future__ import annotations

from pathlib import Path

from shared.cli.command_line import check_name, common_parser, resolve, run_main
from shared.config.schema import check_address
from shared.errors import UserError
from shared.evaluation.judges.verdicts import compare_verdicts
from shared.evaluation.run import Endpoint, check_subject, chosen_questions, evaluate_subject
from shared.processes.owned_process import locked
from shared.runs.manifest import question_file
from shared.runs.output_paths import refuse_overwriting


def main() -> None:
    """Evaluate, or with --verdicts compare the judges."""
    parser = common_parser("python -m shared.evaluation", "Play a run's test questions with one model and score them.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--model", type=Path, help="Hugging Face model folder or LoRA adapter; served with vLLM meanwhile"
    )
    what.add_argument("--endpoint", metavar="URL", help="OpenAI-compatible endpoint, ending in /v1")
    what.add_argument(
        "--verdicts", type=Path, metavar="CASES", help="compare our judges with recorded verdicts (JSONL)"
    )
    parser.add_argument("--databases", type=Path, help="with --verdicts: folder of <db_id>/<db_id>.sqlite")
    parser.add_argument("--testsuite", type=Path, help="with --verdicts: folder of <db_id>/*.sqlite or <db_id>.tar.gz")
    parser.add_argument("--tokenizer", type=Path, help="with --endpoint: folder with the model's tokenizer.json")
    parser.add_argument(
        "--served-name", default="auto", help="with --endpoint: the model to ask for (default: the only one)"
    )
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--split", choices=("test", "val", "train"), default="test", help="of the run (default: test)")
    asked.add_argument(
        "--questions", type=Path, metavar="FILE", help="questions.jsonl that `data import` wrote, instead"
    )
    parser.add_argument("--name", help="folder under evaluations/ (default: name of the model folder, or `endpoint`)")
    args = parser.parse_args()
    if args.verdicts:
        if not args.databases:
            raise UserError("--verdicts needs --databases FOLDER: the verdicts are about queries on these databases.")
        compare_verdicts(args.verdicts, args.databases, args.testsuite)
        return
    config, run = resolve(args)
    if args.endpoint:
        check_address("--endpoint", args.endpoint)
    if args.endpoint and not args.tokenizer:
        raise UserError("--endpoint needs --tokenizer FOLDER: observations are cut in the model's own tokens.")
    name = args.name or (args.model.resolve().name if args.model else "endpoint")
    check_name("--name", name)
    refuse_overwriting([run.evaluation(name)], filter(None, (args.questions, args.model, args.tokenizer)))
    if args.questions and not args.questions.read_bytes().strip():
        raise UserError(
            f"--questions {args.questions} holds no question; give the questions.jsonl that `python -m data import` "
            "writes."
        )
    file = args.questions or question_file(run, args.split)
    questions = chosen_questions(config, run, file)
    subject = args.model or Endpoint(args.endpoint, args.tokenizer, args.served_name)
    if args.dry_run:
        check_subject(subject)
        print(f"{len(questions)} questions of {file} -> {run.evaluation(name)}")
        return
    with locked(run.path):
        evaluate_subject(subject, config, run, name, questions)


if __name__ == "__main__":
    run_main(main)
