"""Run tables of the paper: python scripts/launch.py TABLE... [--where local|slurm|print]

Finished runs are skipped, unfinished runs resume, and failed runs restart with --rerun-failed. If
you add measures to a table, its finished runs are measured from their final checkpoints. You can
repeat the command at any time, even while its runs are active: no run is started twice. Several
tables share one queue, in the order given. --cells and --seeds select runs of the tables. --set
key=value changes their settings; such runs get their own folders and are shown as reduced. Exit
codes: 0 if all runs are done (or submitted), 1 if some failed, 75 if some are unfinished and the
same command resumes them.
"""

import argparse
import functools
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without installing ed

from ed.analysis.collect import (
    DAMAGED,
    Row,
    by_error,
    check_root,
    collect_run,
    likewise,
    row_or_damage,
    seed_differences,
)
from ed.analysis.markdown import plural
from ed.analysis.spec import (
    Run,
    SpecError,
    Table,
    cells_named,
    check_cells,
    expand,
    reduced_name,
)
from ed.analysis.tables import load_table
from ed.engine.errors import composition, explain, or_explain
from ed.runtime.files import APP, HOME, INSTALLED, refuse_control
from ed.runtime.runs import (
    BROKEN,
    CHECKPOINTS,
    CONFIG,
    DEVIATIONS,
    PLACES,
    Status,
    failed_at_once,
    flat,
    has_begun,
    is_busy,
    is_done,
    is_run,
    write_deviations,
)
from scripts.local import quiet_note, run_all
from scripts.places import located, quoted, require_places
from scripts.slurm import queued_among, require_slurm, submit
from scripts.standings import report, standings, with_committed


class LaunchError(ValueError):
    """Raised if the request cannot be carried out."""


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        refuse_control_characters(options)
        if options.runs.exists() and not options.runs.is_dir():
            raise LaunchError(f"--runs {options.runs}: not a folder")
        plans = planned(options)
        if options.status:
            return worst(print_status(table, runs) for table, runs in plans)
        if options.where == "print":
            refuse_damaged(row_or_damage(run, table) for table, runs in plans for run in runs)
            missing = [
                [run for run in runs if not is_done(run.folder) or lacks_measures(run)]
                for _, runs in plans
            ]
            for (table, _), runs in zip(plans, missing, strict=True):
                note_or_warn(runs, table)
            print(*(shlex.join(command(run)) for run in distinct(missing)), sep="\n")
            return 0
        if options.where == "slurm":
            require_slurm(options.partition)
        due = distinct([prepared(table, runs, options) for table, runs in plans])
        if options.where == "slurm":
            name = "+".join(table.name for table, _ in plans)[:60]
            return submit_array(name, due, options)
        commands = {run: command(run) for run in due}
        run_all(commands, options.jobs, rerun_failed=options.rerun_failed)
        return worst(report(table, standings(runs, table)) for table, runs in plans)
    except Exception as error:  # one line for user errors, a traceback for bugs
        return explain(error)


def planned(options: argparse.Namespace) -> list[tuple[Table, list[Run]]]:
    """Returns the tables with their chosen runs, without tables that have none of --cells."""
    tables = [load_table(name) for name in dict.fromkeys(options.tables)]
    check_cells(tables, options.cells or ())
    plans = []
    for table in tables:
        check_root(options.runs, table)
        cells = options.cells and [name for name in options.cells if cells_named(table, name)]
        runs = expand(
            table,
            cells=cells,
            seeds=options.seeds,
            sets=options.set,
            data=[located(text) for text in options.data],
            root=options.runs.absolute(),
        )
        plans += [(table, runs)] if runs else []
    return plans


def print_status(table: Table, runs: Sequence[Run]) -> int:
    """Prints the status of a table's runs and returns the exit code."""
    rows = standings(runs, table)
    code = report(table, with_committed(rows, table))
    for run, row in zip(runs, rows, strict=True):
        if row.status == Status.RUNNING and (note := quiet_note(run)):
            print(note)
    return code


def prepared(table: Table, runs: Sequence[Run], options: argparse.Namespace) -> list[Run]:
    """Freezes the configs of the runs that are due and returns these runs."""
    rows = standings(runs, table)
    refuse_damaged(rows)
    unmeasured = {run.folder for run in runs if lacks_measures(run)}
    unmeasured -= queued_among(unmeasured)[0]
    due = [
        run
        for run, row in zip(runs, rows, strict=True)
        if is_due(row, options.rerun_failed) or run.folder in unmeasured
    ]
    if due and options.where == "local":
        require_places(options.data)
    freeze(due, table)
    for difference in seed_differences((collect_run(run, table) for run in runs), table):
        print(f"warning: {difference}", file=sys.stderr)
    return due


def refuse_damaged(rows: Iterable[Row]) -> None:
    """Raises if a run's folder is damaged or holds another run."""
    if groups := by_error(row for row in rows if row.status == DAMAGED):
        raise LaunchError(likewise(groups[0][0].error, groups[0]))


def distinct(groups: Iterable[Sequence[Run]]) -> list[Run]:
    """Returns the runs of all tables in order; tables may share runs."""
    return list({run.folder: run for runs in groups for run in runs}.values())


def worst(codes: Iterable[int]) -> int:
    """Returns the exit code for several tables."""
    found = set(codes)
    return 1 if 1 in found else max(found, default=0)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    tables = "names or paths of experiment files"
    add("tables", nargs="+", metavar="TABLE", help=tables)
    where = "run on this machine (default), submit to SLURM, or only print the commands"
    add("--where", choices=("local", "slurm", "print"), default="local", help=where)
    add("--status", action="store_true", help="only show the state of all runs")
    several = {"nargs": "+", "action": "extend"}
    add("--cells", **several, metavar="CELL", help="only these cells, grids or grid points")
    add("--seeds", **several, type=int, metavar="SEED", help="only these seeds")
    change = "change settings, e.g. task.epochs=20"
    add("--set", **several, default=[], metavar="KEY=VALUE", help=change)
    data = f"another location of the table's data; KEY is one of {', '.join(PLACES)}"
    add("--data", **several, default=[], metavar="[KEY=]PLACE", help=data)
    add("--rerun-failed", action="store_true", help="run failed runs again")
    add("--runs", type=Path, default=HOME / "runs", metavar="DIR", help="folder for the runs")
    add("--jobs", type=int, metavar="N", help="parallel runs (default: 1 per GPU, 8 on SLURM)")
    slurm = parser.add_argument_group("SLURM, passed to sbatch")
    slurm.add_argument("--partition", metavar="NAME", help="as in sinfo")
    slurm.add_argument("--time", metavar="LIMIT", help="time limit of a run, e.g. 02:00:00")
    slurm.add_argument("--gres", metavar="LIST", help="resources of each node, e.g. gpu:1")
    slurm.add_argument("--gpus", type=int, metavar="N", help="GPUs per node, one process each")
    slurm.add_argument("--nodes", type=int, metavar="N", help="nodes per run; they share batches")
    slurm.add_argument("--cpus", type=int, metavar="N", help="cores per process, to decode images")
    options = parser.parse_args(arguments)
    if options.jobs is not None and options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: at least 1")
    for name in ("partition", "time", "gres", "gpus", "nodes", "cpus"):
        value = getattr(options, name)
        if value is not None and options.where != "slurm":
            parser.error(f"--{name} {value}: only with --where slurm; add it, or drop --{name}")
        if isinstance(value, int) and value < 1:
            parser.error(f"--{name} {value}: at least 1")
    return options


def refuse_control_characters(options: argparse.Namespace) -> None:
    for name, value in vars(options).items():
        for word in value if isinstance(value, list) else [value]:
            refuse_control(str(word), f"--{name} {str(word)!r}")


def command(run: Run) -> list[str]:
    group = f"{run.table}/{run.cell}"  # for wandb; not part of a run's identity
    places = [f"logger.group={quoted(group)}", f"system.run_dir={quoted(str(run.folder))}"]
    script = str(APP / "train.py") if INSTALLED else "train.py"  # users may run it from any folder
    return [sys.executable, script, *run.arguments, *places]


def is_due(row: Row, rerun_failed: bool) -> bool:
    due = (Status.PENDING, Status.STOPPED, *(BROKEN if rerun_failed else ()))
    return row.status in due


def lacks_measures(run: Run) -> bool:
    """Whether a finished run lacks a measure of its table, and its final checkpoint is there."""
    asked = any(override.startswith("measures") for override in run.overrides)
    kept = asked and any((run.folder / name).exists() for name in CHECKPOINTS)
    if not (kept and is_done(run.folder)):
        return False
    from ed.engine.trust import read_config

    stored = read_config(run.folder / CONFIG).get("measures") or {}
    return not config_of(run).measures.keys() <= stored.keys()


@functools.cache
def composed(cell: str, arguments: tuple[str, ...]):
    """Composes the config of a cell."""
    from ed.engine.compose import compose_config

    try:
        return compose_config(list(arguments))
    except Exception as error:  # Hydra has several error types, all about the overrides
        reason = composition(error, arguments)
        raise SpecError(f"cell {cell} does not compose: {reason}") from None


def config_of(run: Run):
    """Returns the config of a run, composed once for all seeds of its cell."""
    from omegaconf import OmegaConf

    shared = tuple(word for word in run.arguments if not word.startswith("seed="))
    own = {"seed": run.seed, "system": {"run_dir": str(run.folder)}}
    return OmegaConf.merge(composed(run.cell, shared), own)


def freeze(runs: Sequence[Run], table: Table) -> None:
    """Writes the configs of all runs before any starts; existing configs must match."""
    from ed.engine.run import RunFolder

    configs = [config_of(run) for run in runs]
    note_deviations(runs, table)
    for run, config in zip(runs, configs, strict=True):
        if is_busy(run.folder):
            continue  # another launcher has already frozen it
        if failed_at_once(run.folder) or waits_for_other_place(run, config):
            (run.folder / CONFIG).unlink(missing_ok=True)
        RunFolder(run.folder, config).close()


def waits_for_other_place(run: Run, config) -> bool:
    """Whether a run was frozen but never started, and only its data location has changed."""
    from omegaconf import OmegaConf

    from ed.engine.trust import read_config

    if not is_run(run.folder) or has_begun(run.folder):
        return False
    stored = read_config(run.folder / CONFIG)
    before, now = (flat(OmegaConf.to_container(c, resolve=True)) for c in (stored, config))
    return all(before.get(key) == now.get(key) for key in {*before, *now} - {*PLACES})


def note_deviations(runs: Sequence[Run], table: Table) -> None:
    """Writes the files that let the collector find reduced runs from this table and their own."""
    folders = {
        run.folder.parents[2] / reduced_name(name, run.deviations): list(run.deviations)
        for run in runs
        if run.deviations
        for name in (run.table, table.name)
    }
    for folder, deviations in folders.items():
        write_deviations(folder, deviations)


def note_or_warn(runs: Sequence[Run], table: Table) -> None:
    """Like `note_deviations`, but only warns if the folders cannot be written on this machine."""
    try:
        note_deviations(runs, table)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
        print(f"hint: {reason}; table.py needs {DEVIATIONS} to find these runs", file=sys.stderr)


def submit_array(name: str, runs: Sequence[Run], options: argparse.Namespace) -> int:
    """Submits the runs to SLURM without waiting for them."""
    settings = {key: getattr(options, key) for key in ("partition", "time", "gres", "nodes")}
    settings["cpus-per-task"] = options.cpus
    if options.gpus is not None:
        settings |= {"ntasks-per-node": options.gpus, "gres": options.gres or f"gpu:{options.gpus}"}
    job = submit(
        options.runs.absolute(),
        name,
        {run.folder: command(run) for run in runs},
        root=APP,
        parallel=options.jobs or 8,
        settings=settings,
    )
    print(f"job {job}: {plural(len(runs), 'run')}" if job else "nothing to submit")
    return 0


if __name__ == "__main__":
    sys.exit(or_explain(main))
