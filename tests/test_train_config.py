"""Config files of `flexfloor train`: what is in them, what is refused, and that nothing heavy is loaded for that."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from flexfloor.cli import main
from flexfloor.cli.app import app
from flexfloor.errors import InputError, concerning
from flexfloor.integrations.trl.arguments import OWNED, check_owned
from flexfloor.integrations.trl.origin import Origin
from flexfloor.integrations.trl.settings import OF_FILES, OF_REASONING_GYM, TaskSettings, TrainSettings, read_settings
from flexfloor.settings import EngineSettings, Settings

REPOSITORY = Path(__file__).parents[1]
DOCUMENT = REPOSITORY / "docs" / "training.md"
NEEDED = 'model = "m"\noutput = "o"\n'
TASK = '[task]\ntrain = "p.jsonl"\nreward = "rewards:exact"\n'


def write(folder: Path, text: str) -> Path:
    file = folder / "config.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_file_and_changes_make_settings(tmp_path: Path):
    text = NEEDED + "history = false\n" + TASK + '[trl]\nlearning_rate = 1e-5\n[engine]\nworker_memory = "1GiB"\n'
    changes = ["trl.seed=3", "output=runs/new", "trl.bf16=false", "engine.pace = 2"]
    settings = read_settings(write(tmp_path, text), changes)
    assert (settings.model, settings.output, settings.policy) == (Path("m"), Path("runs/new"), "flexfloor")
    assert (settings.rollout_history, settings.engine.worker_memory, settings.engine.pace) == (None, 2**30, 2)
    assert settings.trl == {"learning_rate": 1e-5, "seed": 3, "bf16": False}
    assert settings.task.reward == ("rewards:exact",)
    assert read_settings(write(tmp_path, NEEDED + TASK)).rollout_history == "auto"
    assert read_settings(write(tmp_path, NEEDED + 'history = "h"\n' + TASK)).rollout_history == Path("h")


GYM = '[task]\nreasoning_gym = "chain_sum"\n'
REFUSED: dict[str, tuple[str, str]] = {
    "unknown key": ('polcy = "x"\n' + TASK, "config.toml: unknown key 'polcy'; did you mean 'policy'?"),
    "unknown key of the task": (TASK + 'rewrd = "x"', "unknown key 'rewrd' in [task]; did you mean 'reward'?"),
    "unknown key of the engine": (TASK + "[engine]\npase = 1", "unknown key 'pase' in [engine]; did you mean 'pace'?"),
    "unknown table": (TASK + "[fleet]\nworkers = 1", "unknown key 'fleet'; there is model, output, workers"),
    "no task": ("", "config.toml: task is missing"),
    "task that is no table": ("task = 3", "config.toml: task: "),
    "trl that is no table": ("trl = 3\n" + TASK, "config.toml: trl: "),
    "number out of range": ("workers = 0\n" + TASK, "workers: input should be greater than or equal to 1, got 0"),
    "number of the engine": (TASK + "[engine]\npace = 0", "engine.pace: input should be greater than 0, got 0"),
    "oracle": ('knowledge = "oracle"\n' + TASK, "config.toml: knowledge: input should be 'auto', 'none', 'history'"),
    "history that is true": ("history = true\n" + TASK, "config.toml: history: "),
    "no prompts": ('[task]\nreward = "a:b"', "config.toml: task: give either train or reasoning_gym"),
    "two sources": (TASK + 'reasoning_gym = "chain_sum"', "config.toml: task: give either train or reasoning_gym"),
    "no reward": ('[task]\ntrain = "p.jsonl"', "config.toml: task: reward is missing; give a function like"),
    "field of the other source": (TASK + "size = 3", "config.toml: task: size does not go with train; leave it out"),
    "arguments without a function": (GYM + "arguments = {}", "task: arguments does not go with reasoning_gym"),
    "template": (GYM + 'prompt_template = "Q:"', "task: prompt_template does not hold {question}"),
    "no TOML": ("model =", "config.toml is not TOML"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_file_and_key(tmp_path: Path, case: str):
    text, told = REFUSED[case]
    with pytest.raises(InputError) as caught:
        read_settings(write(tmp_path, NEEDED + text))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("workers=0", "--set workers=0: input should be greater than or equal to 1, got 0"),
        ("engine.pace=0", "--set engine.pace=0: input should be greater than 0, got 0"),
        ("polcy=static", "--set polcy=static: unknown key 'polcy'; did you mean 'policy'?"),
        ("engine.pase=1", "--set engine.pase=1: unknown key 'pase' in [engine]; did you mean 'pace'?"),
        ("task.size=3", "--set task.size=3: size does not go with train; leave it out"),
        ("task=3", "--set task=3: input should be a valid dictionary"),
        ("engine={pace=0}", "--set engine={pace=0}: input should be greater than 0, got 0"),
    ],
)
def test_refusals_of_changes_name_the_change_and_not_the_file(tmp_path: Path, change: str, told: str):
    with pytest.raises(InputError) as caught:
        read_settings(write(tmp_path, NEEDED + TASK), ["trl.seed=3", change])
    assert str(caught.value).startswith(told)
    assert "config.toml" not in str(caught.value)


@pytest.mark.parametrize("change", ["trl", "=3", "trl..seed=1", "workers.x=1"])
def test_changes_that_are_none(tmp_path: Path, change: str):
    with pytest.raises(InputError, match=r"--set .*write it like trl\.seed=3"):
        read_settings(write(tmp_path, "workers = 1\n" + NEEDED + TASK), [change])


@pytest.mark.parametrize("name", [*OWNED, "vllm_mode"])
def test_fields_of_trl_that_are_ours_come_with_a_remedy(tmp_path: Path, name: str):
    file = write(tmp_path, NEEDED + TASK)
    changes = [f"trl.{name}=0.5"]
    settings = read_settings(file, changes)
    with pytest.raises(InputError, match=rf"--set trl.{name}=0.5 cannot be given: .+"):
        check_owned(settings, Origin.of(file, changes))
    with pytest.raises(InputError, match=rf"config.toml: trl.{name} cannot be given: .+"):
        check_owned(settings, Origin.of(file))


def test_neutral_values_of_them_pass(tmp_path: Path):
    file = write(tmp_path, NEEDED + TASK)
    check_owned(read_settings(file, ["trl.repetition_penalty=1.0", "trl.generation_kwargs={}"]), Origin.of(file))


def test_bad_configs_load_nothing_heavy(tmp_path: Path):
    file = write(tmp_path, NEEDED + TASK + "[trl]\nmin_p = 0.5\n")
    code = (
        "import sys, flexfloor.cli as c; r = c.main(['train', sys.argv[1]]); c.main(['train', '--help'])\n"
        "print(r, sorted({m.partition('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "min_p cannot be given" in done.stderr
    assert done.stdout.splitlines()[-1].startswith("2 [")
    for heavy in ("torch", "transformers", "trl", "datasets"):
        assert f"'{heavy}'" not in done.stdout.splitlines()[-1]


def test_a_missing_config_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(["train", str(tmp_path / "none.toml")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("flexfloor: error: ")
    assert "none.toml cannot be read" in err


def test_the_output_folder_of_something_else_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    file = write(tmp_path, TASK)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("x")
    set_ = ["--set", f"model={tmp_path}", "--set", f"output={tmp_path}/out"]
    for options, told in (([], "holds files already; name a new folder"), (["--resume"], "holds no run of flexfloor")):
        assert main(["train", str(file), *set_, *options]) == 2
        assert told in capsys.readouterr().err
    assert main(["train", str(file), "--set", f"model={tmp_path}", "--set", f"output={file}"]) == 2
    assert "is a file; name a folder" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def shown(default: object) -> str:
    """A default as it would stand in the file; nothing where there is none."""
    if isinstance(default, Settings) or default in (None, {}, ()):
        return ""
    text = json.dumps(default, ensure_ascii=False)
    return f"`{text}`"


def rows(model: type[Settings]) -> list[str]:
    """The table that documents a model."""
    lines = ["| field | default | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        default = "needed" if field.is_required() else shown(field.default)
        lines.append(f"| `{name}` | {default} | {field.description} |")
    return lines


def owned() -> list[str]:
    lines = ["| field | instead |", "|---|---|"]
    remedies: dict[str, list[str]] = {}
    for name, remedy in [*OWNED.items(), ("vllm_…", OWNED["use_vllm"])]:
        remedies.setdefault(remedy, []).append(f"`{name}`")
    return lines + [f"| {', '.join(names)} | {remedy} |" for remedy, names in remedies.items()]


def options() -> list[str]:
    """The options of the command as `flexfloor train --help` tells them."""
    lines = ["| option | meaning |", "|---|---|"]
    group: Any = typer.main.get_command(app)
    for parameter in group.commands["train"].params:
        if parameter.param_type_name == "option":
            shown = " ".join(filter(None, (parameter.opts[0], parameter.metavar)))
            lines.append(f"| `{shown}` | {parameter.help} |")
    return lines


def at_resume() -> list[str]:
    from flexfloor.integrations.trl.resume import RULES

    lines = ["| settings | may be other | why |", "|---|---|---|"]
    for rule in RULES:
        lines.append(f"| {', '.join(f'`{name}`' for name in rule.settings)} | {rule.may} | {rule.why} |")
    why = "they count from the first step after the resume; the schedule of the learning rate from the second"
    return [*lines, f"| all others | yes | {why} |"]


TABLES: dict[str, Callable[[], list[str]]] = {
    "options": options,
    "settings": lambda: rows(TrainSettings),
    "task": lambda: rows(TaskSettings),
    "engine": lambda: rows(EngineSettings),
    "owned": owned,
    "resume": at_resume,
}


@pytest.mark.parametrize("table", TABLES)
def test_the_document_has_every_field_as_it_is(table: str):
    """FLEXFLOOR_WRITE_DOCS=1 writes the tables anew."""
    text, wanted = DOCUMENT.read_text(encoding="utf-8"), "\n".join(TABLES[table]())
    pattern = rf"(<!-- {table} -->\n)(?:\n(?:\|.*\n)+)?"
    if os.environ.get("FLEXFLOOR_WRITE_DOCS"):
        text = re.sub(pattern, lambda m: f"{m[1]}\n{wanted}\n", text)
        DOCUMENT.write_text(text, encoding="utf-8")
    found = re.search(pattern, text)
    assert found is not None
    assert found[0].strip().splitlines()[2:] == wanted.splitlines()


def test_the_document_s_example_is_a_config(tmp_path: Path):
    blocks = re.findall(r"^```toml\n((?:.*\n)*?)```$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert blocks
    for block in blocks:
        file = write(tmp_path, block)
        check_owned(read_settings(file), Origin.of(file))


def test_fields_of_one_source_are_fields():
    assert {*OF_FILES, *OF_REASONING_GYM} <= set(TaskSettings.model_fields)


def test_a_config_survives_being_written():
    from flexfloor.integrations.trl.records import differences, to_toml

    values = {
        "a": 'say "x"\n\\ \x7f ü', "b": [1, 2.5, True, "x"], "c": 1e-05, "n": None, "e": float("inf"), "f": [],
        "t": {"k": {"deep key": [{"x": 1}], "none": None}, "dotted.key": -3, "none": None},
    }  # fmt: skip
    back = tomllib.loads(to_toml(values))
    assert back == {
        "a": values["a"], "b": [1, 2.5, True, "x"], "c": 1e-05, "e": float("inf"), "f": [],
        "t": {"k": {"deep key": [{"x": 1}]}, "dotted.key": -3},
    }  # fmt: skip
    assert list(differences(back, back | {"c": 2, "t": back["t"] | {"new": 1}})) == [
        ("c", 1e-05, 2),
        ("t.new", None, 1),
    ]


def test_metrics_files_are_cut_at_the_step_that_a_run_goes_on_from(tmp_path: Path):
    from flexfloor.integrations.trl.records import Epoch, MetricsFile, epochs_of, evaluations, read_metrics

    class State:
        global_step, max_steps = 1, 4

    file = tmp_path / "metrics.jsonl"
    told: list[dict] = []
    first = MetricsFile(file, from_step=0, on_log=told.append)
    for step in (1, 2, 3):
        State.global_step = step
        first.on_log(None, State, None, {"reward": 0.5, "loss": float("nan"), "epoch": step / 2})
    first.close()
    file.write_text(file.read_text() + '{"step": 4, "rew')  # killed while it wrote
    again = MetricsFile(file, from_step=2, on_log=told.append)
    State.global_step = 3
    rates = {"flexfloor/response_tokens": 300, "flexfloor/tokens_per_occupied_s_with_regrow": 30.0}
    rates["flexfloor/tokens_per_occupied_iteration"] = 3.0
    again.on_log(None, State, None, {"reward": 0.1, "epoch": 1.5} | rates)
    rates = {"flexfloor/response_tokens": 100, "flexfloor/tokens_per_occupied_s_with_regrow": 2.0}
    again.on_log(None, State, None, {"reward": 0.3, "epoch": 2.0} | rates)
    again.on_log(None, State, None, {"eval_reward": 0.2, "epoch": 2.0})
    again.close()
    records = read_metrics(file)
    assert [(r["step"], r.get("reward")) for r in records] == [(1, 0.5), (2, 0.5), (3, 0.1), (3, 0.3), (3, None)]
    assert (records[0]["loss"], len(told)) == (None, 6)
    assert epochs_of(records) == [Epoch(1, 2, 0.5, None, None), Epoch(2, 2, (0.1 + 0.3) / 2, 400 / 60, 300 / 100)]
    assert evaluations(records) == [(3, 0.2)]


def test_an_origin_names_the_change_at_fault_or_the_file():
    origin = Origin.of(Path("c.toml"), ["workers=9", "workers=1", "trl.seed = 3", "engine.pace=2"])
    assert origin.at("policy") == "c.toml: policy"
    assert origin.at("min_workers", "workers") == "--set workers=1"
    assert origin.at("trl.seed") == "--set trl.seed = 3"
    assert origin.at("engine") == "--set engine.pace=2"
    assert origin.at("trl.seeds") == "c.toml: trl.seeds"
    assert origin.named_in("seed must be even", "trl", ["seed", "beta"]) == "--set trl.seed = 3"
    assert origin.named_in("beta must be even", "trl", ["seed", "beta"]) == "c.toml: trl"
    assert origin.named_in("no", "trl", ["seed"]) == "c.toml: trl, --set trl.seed = 3"
    assert origin.command(resume=True) == (
        "flexfloor train c.toml --set workers=1 --set 'trl.seed = 3' --set engine.pace=2 --resume"
    )


def test_what_lower_layers_refuse_is_spelled_as_in_the_config():
    origin = Origin.of(Path("c.toml"), ["workers=1"])
    error = InputError("too small; give more workers or more `worker_memory`, or `other`", settings=("worker_memory",))
    assert str(origin.place(error)) == (
        "c.toml: engine.worker_memory: too small; give more workers or more engine.worker_memory, or `other`"
    )
    assert str(origin.place(InputError("broken"))) == "broken"
    with pytest.raises(InputError) as caught, concerning("model", "workers"):
        raise InputError("broken")
    assert str(origin.place(caught.value)) == "--set workers=1: broken"


def test_the_rules_of_a_resume_are_about_settings():
    from trl import GRPOConfig

    from flexfloor.integrations.trl.resume import RULES, rule_for

    known = {*TrainSettings.model_fields, *(f"task.{name}" for name in TaskSettings.model_fields)}
    known |= {f"engine.{name}" for name in EngineSettings.model_fields}
    known |= {f"trl.{field.name}" for field in fields(GRPOConfig)}
    named = [name.removesuffix(".dtype") if name.startswith("trl.") else name for r in RULES for name in r.settings]
    assert set(named) <= known
    assert len(set(named)) == len(named)
    rule = rule_for("task.arguments.n")
    assert rule is not None
    assert rule.may == "no"
    assert rule_for("trl.seeds") is None
    assert rule_for("policy") is None


BELOW_COMMANDS = ("fleets", "integrations", "ledger", "policy", "world", "fleet.py", "prompts.py", "settings.py")


def test_layers_below_the_commands_name_no_options():
    """What they say is read by users of a config file and of Python too; `name` in it is spelled as those give it."""
    found = []
    for part in BELOW_COMMANDS:
        root = REPOSITORY / "src" / "flexfloor" / part
        for file in [root] if root.is_file() else sorted(root.rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            documents = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
                    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", node.value))
                    found += [f"{file.name}:{node.lineno}: {option}" for option in named - {"--resume", "--set"}]
    assert not found
