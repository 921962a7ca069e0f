"""`agentrl teach`: joins a run as a teacher."""

import click

from agentrl.cli.databases import opened_store, trained_run
from agentrl.config.command_line import Count, FlagCommand, Number
from agentrl.config.sections import RootConfig


@click.command("teach", cls=FlagCommand, sections=("run", "store"))
@click.argument("run", metavar="RUN")
@click.option(
    "--teacher",
    "named_teachers",
    multiple=True,
    required=True,
    metavar="NAME=MODEL",
    help="A teacher's name, and its server's address or its checkpoint; may be repeated.",
)
@click.option(
    "--teacher_prompt",
    "teacher_prompts",
    multiple=True,
    default=("",),
    metavar="TEXT",
    help="Text before every conversation, for the teachers alone, tokens of the template included; "
    "{answer}, {solution}, {feedback} and other fields of the question stand for their values. May be "
    "repeated: the first text that has all its values.",
)
@click.option(
    "--solution_score",
    type=Number(),
    metavar="NUMBER",
    default=1.0,
    help="Least score of the attempt that {solution} shows. [1]",
)
@click.option(
    "--teacher_tokenizer",
    metavar="PATH",
    help="Where the teachers' tokenizer is; by default, where their servers say their model is.",
)
@click.option(
    "--teacher_concurrency", type=Count(), default=16, help="Records at a time for a teacher. [16]"
)
@click.option(
    "--exit_when_taught",
    is_flag=True,
    help="End when no record waits, rather than when the run has ended.",
)
async def teach(
    config: RootConfig,
    run: str,
    named_teachers: tuple[str, ...],
    teacher_prompts: tuple[str, ...],
    solution_score: float,
    teacher_tokenizer: str | None,
    teacher_concurrency: int,
    exit_when_taught: bool,
) -> int:
    """Store the logprobs of other models at the sampled tokens of a run (docs/teachers.md).

    RUN is the run's name or its output directory. Start as many processes as you like; each record
    is taught once. It waits for a run that starts later; records of an ended run can be taught, too.
    """
    from agentrl.inference.teaching.privileged_prompts import check_placeholders
    from agentrl.inference.teaching.teacher_process import (
        TeachingSettings,
        parse_teacher,
        run_teachers,
    )
    from agentrl.runtime.logs import setup_logging

    plans = [parse_teacher(text) for text in named_teachers]
    check_placeholders(teacher_prompts)
    trained = trained_run(config, run)
    setup_logging("teacher")
    settings = TeachingSettings(
        prompts=teacher_prompts,
        solution_score=solution_score,
        tokenizer=teacher_tokenizer,
        concurrency=teacher_concurrency,
        exit_when_taught=exit_when_taught,
    )
    async with opened_store(trained, also_unstarted=True) as store:
        await store.ensure_schema()
        await run_teachers(trained, store, plans, settings)
    return 0
