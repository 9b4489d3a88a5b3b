"""A training run from its settings: everything checked first, then TRL's GRPOTrainer over a FlexFloor fleet."""

from __future__ import annotations

import os
import shutil
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from flexfloor.errors import FlexFloorError, InputError, WorkerFailedError, concerning
from flexfloor.integrations.trl.arguments import (
    check_owned,
    check_sampling,
    check_sizes,
    grpo_fields,
    make_grpo_config,
    refused_by_trl,
    require_trl,
)
from flexfloor.integrations.trl.checks import (
    BEGIN,
    CONFIG,
    ERROR,
    LEDGERS,
    LOCK,
    METRICS,
    MODEL,
    check_fleet,
    check_output,
    check_policy,
    clear_start,
    is_untrained,
)
from flexfloor.integrations.trl.named import importable, told
from flexfloor.integrations.trl.origin import Origin
from flexfloor.integrations.trl.rewards import RewardError, watch_all
from flexfloor.integrations.trl.settings import OF_FILES, OF_REASONING_GYM, TrainSettings
from flexfloor.outputs import atomic_write, write_json
from flexfloor.settings import read_toml

Tell = Callable[[str], None]


def train(
    settings: TrainSettings,
    config: Path,
    *,
    changes: Sequence[str] = (),
    resume: bool = False,
    tell: Tell = lambda text: None,
    on_log: Callable[[dict[str, Any]], None] = lambda record: None,
    on_record: Callable[[dict[str, Any]], None] | None = None,
) -> Any:
    """Run the training that the settings describe. Returns a TrainResult.

    config: file that the settings come from; modules in its folder can be named in it. changes: `key=value` that they
    come from too, which errors name. resume: go on from the newest whole checkpoint in the output folder. tell: gets a
    line for each step of the way. on_log: told what is logged;
    on_record: each record of a rollout's ledger. Raises InputError before anything is started or written; later
    FlexFloorError, and RewardError for a reward function at fault. When it breaks off, by an exception of any kind, the
    last whole step has a checkpoint.
    """
    origin = Origin.of(config, changes)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("flexfloor train is one process, whose workers it starts itself; run it without a launcher")
    try:
        check_owned(settings, origin)
        require_trl(config)
        check_policy(settings)
        check_output(settings.output, origin, resume)
        folders = importable(config.absolute().parent, Path.cwd())
        with folders, undone_if_empty(settings.output), locked(settings.output, origin):
            return _train(settings, origin, resume, tell, on_log, on_record)
    except WorkerFailedError as error:
        raise failed_worker(error, f"{origin.spelled(error)}{to_go_on(settings.output, origin)}") from error
    except RewardError:
        raise
    except InputError as error:
        raise origin.place(error) from error


def _train(
    settings: TrainSettings,
    origin: Origin,
    resume: bool,
    tell: Tell,
    on_log: Callable[[dict[str, Any]], None],
    on_record: Callable[[dict[str, Any]], None] | None,
) -> Any:
    tell("reading model and task")
    from flexfloor.fleets.engine.checkpoint import inspect_checkpoint
    from flexfloor.integrations.trl.tasks import load_task
    from flexfloor.prompts import load_tokenizer

    with concerning("model"):
        info = inspect_checkpoint(settings.model)
        tokenizer = load_tokenizer(settings.model)
        if tokenizer is None:
            raise InputError(f"{settings.model}: the model has no tokenizer, which training needs; add its files")
    shape = info.shape
    task = load_task(settings.task, origin, tokenizer, vocab_size=shape.vocab_size, max_context=shape.max_context)
    held_out = f", {len(task.eval)} held out" if task.eval else ""
    tell(f"{len(task.train)} prompts from {task.source}{held_out}")

    from flexfloor.integrations.trl import records
    from flexfloor.integrations.trl.checkpoints import SaveError, WholeSteps, has_ended, newest_whole, save_last_step
    from flexfloor.integrations.trl.resume import check_resumed_settings, identity, precision, read_identity
    from flexfloor.integrations.trl.rollout import FlexFloorRollout

    fields = grpo_fields(settings, origin, eval_prompts=len(task.eval))
    begun = newest_whole(settings.output, tell) if resume else None
    step = begun[0] if begun else 0
    if resume:
        tell(f"going on from {begun[1]}" if begun else "no whole checkpoint to go on from: starting from the beginning")
    evaluate = settings.evaluate and bool(task.eval)
    args = make_grpo_config(
        fields | {"model_init_kwargs": None}, settings, origin, evaluate_first=evaluate and not begun
    )
    check_sampling(args, origin)
    check_sizes(args, settings, origin, train=len(task.train), held_out=len(task.eval))
    resolved, begin = resolve(settings, fields), identity(info, task)
    if begun:
        was, kept = read_toml(settings.output / CONFIG), read_identity(settings.output / BEGIN)
        check_resumed_settings(was, resolved, info, begun[1], began=kept, now=begin, origin=origin)
    with concerning("dtype"):
        computed = inspect_checkpoint(settings.model, precision(resolved, info))
    check_fleet(settings, computed, longest=task.longest_prompt + args.max_completion_length)

    steps = WholeSteps()
    with ExitStack() as stack:
        stack.enter_context(without_bars())
        threads = stack.enter_context(fixed_arithmetic(settings, on_cpu=args.device.type == "cpu"))
        rollout: FlexFloorRollout  # launched last, when nothing else can be refused any more
        rewards = watch_all(task.rewards, lambda seconds: rollout.add_reward_seconds(seconds), settings.output / ERROR)
        # Not left to the trainer: it would take the experts, which files hold one by one, for missing.
        model = load_model(begun[1] if begun else settings.model, settings, origin, fields["model_init_kwargs"])
        trainer = make_trainer(
            origin,
            model=model,
            reward_funcs=rewards,
            args=args,
            train_dataset=dataset_of(task.train, origin.at("task.train")),
            eval_dataset=dataset_of(task.eval, origin.at("task.eval")) if task.eval else None,
            processing_class=tokenizer,
            rollout_func=lambda prompts, trainer: rollout(prompts, trainer),
            callbacks=[steps],
        )
        engine = settings.engine.model_dump() | {"dtype": str(model.dtype).removeprefix("torch.")}
        rollout = stack.enter_context(
            FlexFloorRollout(
                settings.model,
                workers=settings.workers,
                policy=settings.policy,
                knowledge=settings.knowledge,
                history=settings.rollout_history,
                max_slowdown=settings.max_slowdown,
                min_workers=settings.min_workers,
                chunk=settings.chunk,
                check_responses=settings.check_responses,
                ledgers=settings.output / LEDGERS,
                on_phase=tell,
                on_record=on_record,
                **engine,
            )
        )
        if not begun:
            named = [settings.history] if settings.history else []
            clear_start(settings.output, keep=[*named, settings.output / CONFIG] if resume else named)
        if not (settings.output / BEGIN).exists():
            write_json(settings.output / BEGIN, begin)
        resolved |= {"trainer_threads": threads}
        if settings.deterministic is None:
            resolved["deterministic"] = args.device.type == "cpu"
        write_config(settings.output / CONFIG, resolved, from_checkpoint=bool(begun), tell=tell)
        metrics = records.MetricsFile(settings.output / METRICS, from_step=step, on_log=on_log)
        stack.callback(metrics.close)
        trainer.add_callback(metrics)
        try:
            if begun and has_ended(begun[1], args):
                trainer.state = trainer.state.load_from_json(str(begun[1] / "trainer_state.json"))
                tell(f"all {trainer.state.global_step} steps are done")
            else:
                trainer.train(resume_from_checkpoint=str(begun[1]) if begun else None)
            reached = trainer.state.global_step
            if evaluate and reached not in dict(records.evaluations(metrics.records)):
                trainer.evaluate()
            tell("saving the model")
            save_model(trainer, settings.output / MODEL)
        except BaseException as error:
            steps.release()
            if not isinstance(error, SaveError):
                save_last_step(trainer, steps, tell)
            reached = trainer.state.global_step + 1
            if isinstance(error, WorkerFailedError):
                raise failed_worker(error, f"{error} (step {reached})") from error
            if isinstance(error, FlexFloorError) or not isinstance(error, Exception):
                raise
            raise failure(error, reached, settings.output / ERROR) from error
    seen = records.evaluations(metrics.records)
    return records.TrainResult(
        steps=reached,
        reward_before=seen[0][1] if seen and seen[0][0] == 0 else None,
        reward_after=seen[-1][1] if seen and seen[-1][0] == reached else None,
        epochs=records.epochs_of(metrics.records),
        files={name: settings.output / name for name in (MODEL, METRICS, LEDGERS)},
    )


def failed_worker(error: WorkerFailedError, line: str) -> WorkerFailedError:
    """The same failure, told by another line, which begins like its own."""
    return WorkerFailedError(error.worker, line.removeprefix(f"worker {error.worker} "))


def to_go_on(output: Path, origin: Origin) -> str:
    """What there is of a run whose worker has failed, and the command that goes on with it."""
    from flexfloor.integrations.trl.checkpoints import newest_whole

    kept = newest_whole(output, lambda line: None) if output.is_dir() else None
    if kept:
        return f"; {kept[1]} is kept, go on with: {origin.command(resume=True)}"
    untrained = not output.is_dir() or is_untrained(output)
    return f"; no step is kept, begin again with: {origin.command(resume=not untrained)}"


@contextmanager
def undone_if_empty(folder: Path) -> Iterator[None]:
    """Folders that were made inside the block and hold nothing when it fails go again."""
    absent = [p for p in (folder.absolute(), *folder.absolute().parents) if not p.exists()]
    try:
        yield
    except BaseException:
        for made in absent:
            try:
                made.rmdir()
            except OSError:
                break
        raise


@contextmanager
def locked(output: Path, origin: Origin) -> Iterator[None]:
    """Inside the block the output folder is there and belongs to this run alone. Raises InputError."""
    from filelock import FileLock, Timeout

    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = FileLock(output / LOCK)
        lock.acquire(timeout=0)
    except Timeout:
        where = origin.at("output")
        raise InputError(f"{where}: output {output} is in use by another run; name another folder") from None
    except OSError as error:
        where = origin.at("output")
        raise InputError(f"{where}: output {output} cannot be made ({error.strerror}); name another folder") from None
    try:
        yield
    finally:
        (output / LOCK).unlink(missing_ok=True)
        lock.release()


@contextmanager
def without_bars() -> Iterator[None]:
    """Inside the block transformers draws no progress bars between our lines."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()


@contextmanager
def fixed_arithmetic(settings: TrainSettings, *, on_cpu: bool) -> Iterator[int]:
    """Inside the block torch computes with a fixed number of threads, which it gives, and the same on every run."""
    import torch

    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    threads = settings.trainer_threads or before[0]
    torch.set_num_threads(threads)
    if settings.deterministic or (settings.deterministic is None and on_cpu):
        torch.use_deterministic_algorithms(True)
    try:
        yield threads
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])


def load_model(folder: Path, settings: TrainSettings, origin: Origin, options: Any) -> Any:
    """The trainer's model, in the precision that [trl] or [engine] asks for, else that of the checkpoint."""
    from transformers import AutoModelForCausalLM

    options = {"dtype": settings.engine.dtype, "local_files_only": True} | (options or {})
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), **options)
    except Exception as error:  # transformers raises whatever its parsers raise
        where = origin.at("model", "trl.model_init_kwargs")
        raise InputError(f"{where}: {folder}: the model cannot be loaded ({told(error)})") from error
    # Where TRL takes its reference model from, which is that of the begin also after a resume.
    model.config._name_or_path = str(settings.model)
    return model


def dataset_of(rows: list[dict[str, Any]], where: str) -> Any:
    """Rows as a datasets.Dataset. Raises InputError for columns of mixed types."""
    from datasets import Dataset

    try:
        return Dataset.from_dict({name: [row[name] for row in rows] for name in rows[0]})
    except Exception as error:  # ArrowInvalid and relatives
        raise InputError(f"{where}: a column holds values of several types ({told(error)}); give it one") from error


def make_trainer(origin: Origin, **arguments: Any) -> Any:
    """Raises InputError for what TRL refuses."""
    from flexfloor.integrations.trl.trainer import Trainer

    arguments["processing_class"].padding_side = "left"  # as TRL wants it
    try:
        return Trainer(**arguments)
    except (ValueError, TypeError, ImportError, NotImplementedError) as error:
        raise refused_by_trl(error, origin) from error


def resolve(settings: TrainSettings, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of the config with the value that it has, as plain values. fields: all of [trl]."""
    resolved = settings.model_dump(mode="json") | {"trl": dict(fields)}
    other = OF_FILES if settings.task.train is None else OF_REASONING_GYM
    return resolved | {"task": {name: value for name, value in resolved["task"].items() if name not in other}}


def write_config(file: Path, resolved: Mapping[str, Any], *, from_checkpoint: bool, tell: Tell) -> None:
    """The config as it was resolved; what a resumed run has other than before is told."""
    from flexfloor.integrations.trl.records import differences, to_toml
    from flexfloor.integrations.trl.resume import rule_for

    text = to_toml(resolved)
    if file.exists():
        for key, before, after in differences(read_toml(file), tomllib.loads(text)):
            rule = rule_for(key)
            kept = from_checkpoint and rule is not None and rule.may == "without effect"
            note = f" (without effect: {rule.why})" if kept and rule is not None else ""
            tell(f"changed since the run began: {key} {before!r} → {after!r}{note}")
    with atomic_write(file) as out:
        out.write(text)


def save_model(trainer: Any, folder: Path) -> None:
    """The trained model as a checkpoint folder with its tokenizer, whole or not there."""
    from flexfloor.integrations.trl.checkpoints import save_whole

    unfinished = folder.with_name(f".{folder.name}")
    save_whole(lambda: trainer.save_model(str(unfinished)), unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def failure(error: Exception, step: int, file: Path) -> FlexFloorError:
    """What broke the training off, as one line; its traceback goes to the file."""
    where = ""
    try:
        with atomic_write(file) as out:
            out.write("".join(traceback.format_exception(error)))
        where = f"; see {file}"
    except FlexFloorError:  # a full disk must not hide the error
        pass
    remedy = "; set deterministic = false" if "deterministic" in str(error) else ""
    return FlexFloorError(f"training failed in step {step} ({told(error)}){remedy}{where}")
