"""The command line: parse, call, print.

Every command exits with 0 on success and with 2 on a bad call or bad input, after one line on stderr that says
what is wrong, where, and what to do. A run stopped by Ctrl-C exits with 130 and can be resumed.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dp_sinkhorn import __version__
from dp_sinkhorn.errors import UserError

if TYPE_CHECKING:
    import torch

    from dp_sinkhorn.settings import Plan, Settings

BAD_CALL, INTERRUPTED = 2, 130
_VERY_LARGE_EPSILON = 20.0
_MOST_IMAGES = 10_000_000

app = typer.Typer(
    help="Publish synthetic images of private data with a differential-privacy guarantee that holds.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="digits, mnist, fashion-mnist, a folder or .zip with one sub-folder of images per class, or an .npz "
        "with images and labels",
        show_default=False,
    ),
]
ReleaseArgument = Annotated[Path, typer.Argument(metavar="RELEASE", help="a release folder", show_default=False)]
DataDirOption = Annotated[
    Path | None, typer.Option("--data-dir", help="where mnist and fashion-mnist are; also $DP_SINKHORN_DATA")
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="any setting; may be given several times")
]
PresetOption = Annotated[str | None, typer.Option("--preset", help="named settings; see docs/settings.md")]


@app.command()
def train(
    source: SourceArgument,
    out: Annotated[Path, typer.Option("--out", metavar="RUN", help="folder for the run", show_default=False)],
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="budget; 10 unless the preset says more")] = None,
    delta: Annotated[float | None, typer.Option("--delta", help="a power of ten below 1/records by default")] = None,
    preset: PresetOption = None,
    assignments: SetOption = None,
    data_dir: DataDirOption = None,
    device: DeviceOption = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="go on with an interrupted run")] = False,
) -> None:
    """Train a generator on private records and write a publishable release."""
    from dp_sinkhorn.records import PrivateRecords, load_source
    from dp_sinkhorn.training import Interrupted, RunFolder
    from dp_sinkhorn.training import train as run_training

    overrides = _overrides(assignments, epsilon=epsilon, delta=delta)
    settings = None if resume and preset is None and not overrides else _settings(preset, overrides)
    records = PrivateRecords(load_source(source, data_dir=data_dir), _device(device))
    try:
        with _stop_on_signal() as stopped, _progress_bar() as bar:
            release = run_training(
                records,
                settings,
                out,
                resume=resume,
                on_plan=bar.plan,
                on_step=bar.step,
                on_block=bar.block,
                should_stop=stopped,
            )
    except Interrupted as interrupted:
        again = ["dp-sinkhorn", "train", source, "--out", str(out), "--resume"]
        again += ["--data-dir", str(data_dir)] if data_dir is not None else []
        again += ["--device", device] if device != "auto" else []
        print(f"{interrupted}; nothing is lost. Go on with: {shlex.join(again)}")
        raise typer.Exit(INTERRUPTED) from None
    folder = RunFolder(out)
    print(release.privacy.statement)
    print(f"Release: {folder.release} (publishable); picture: {folder.release / 'samples.png'}")
    print(f"Keep to yourself: {folder.private}")


@app.command()
def sample(
    release: ReleaseArgument,
    out: Annotated[Path, typer.Option("--out", metavar="FILE.npz|DIR", help="an .npz file, or a folder of PNG files")],
    count: Annotated[int | None, typer.Option("--count", help="images in all; 1000 by default")] = None,
    per_class: Annotated[int | None, typer.Option("--per-class", help="images of each class")] = None,
    labels: Annotated[str | None, typer.Option("--labels", metavar="3,5", help="only these classes")] = None,
    grid: Annotated[Path | None, typer.Option("--grid", metavar="FILE.png", help="also draw a grid")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="makes the draw reproducible")] = None,
) -> None:
    """Draw synthetic images from a release."""
    import numpy as np

    from dp_sinkhorn.release import load_release
    from dp_sinkhorn.release.pictures import grid as draw_grid
    from dp_sinkhorn.release.pictures import write_folder

    opened = load_release(release)
    chosen = _chosen_labels(count, per_class, labels, len(opened.classes))
    images, drawn = opened.sample(labels=chosen, seed=seed)
    if out.suffix.lower() == ".npz":
        out.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(out, images=images, labels=drawn, classes=np.array(opened.classes))
    else:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out}: exists and is not an empty folder; name a new folder, or a file ending in .npz")
        write_folder(images, drawn, opened.classes, out)
    if grid is not None:
        grid.parent.mkdir(parents=True, exist_ok=True)
        draw_grid(images, drawn, len(opened.classes)).save(grid, format="PNG")
    print(f"{len(images)} images written to {out}" + (f", grid to {grid}" if grid is not None else ""))


@app.command()
def evaluate(
    release: ReleaseArgument,
    against: Annotated[str, typer.Option("--against", metavar="SOURCE", help="real test images", show_default=False)],
    protocol: Annotated[str, typer.Option("--protocol", help="quick")] = "quick",
    count: Annotated[int, typer.Option("--count", min=100, help="synthetic images to draw")] = 10_000,
    data_dir: DataDirOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="also write the scores")] = None,
    device: DeviceOption = "auto",
    seed: Annotated[int, typer.Option("--seed", help="of sampling and of the classifiers")] = 0,
) -> None:
    """Train classifiers on synthetic images and test them on real ones."""
    from dp_sinkhorn.evaluation import evaluate_quick
    from dp_sinkhorn.images import from_arrays
    from dp_sinkhorn.records import load_source
    from dp_sinkhorn.release import load_release

    if json_file is not None and not json_file.parent.is_dir():
        raise UserError(f"{json_file.parent}: no such folder for --json; make it first")
    if protocol != "quick":
        raise UserError(f"unknown protocol '{protocol}'; this version has: quick")
    where = _device(device)
    opened = load_release(release, where)
    reference = load_source(against, split="test", data_dir=data_dir)
    images, labels = opened.sample(count, seed=seed)
    if len(opened.classes) == len(reference.classes) and tuple(opened.classes) != reference.classes:
        print(
            f"note: the release names its classes {', '.join(opened.classes)} and {against} "
            f"{', '.join(reference.classes)}; they are compared in this order",
            file=sys.stderr,
        )
    synthetic = from_arrays(images, labels, tuple(opened.classes))
    scores = evaluate_quick(
        synthetic, reference, seed=seed, device=where, progress=lambda line: print(line, file=sys.stderr)
    )
    print(f"MLP accuracy      {scores.mlp:6.2f} %")
    print(f"CNN accuracy      {scores.cnn:6.2f} %")
    print(f"Frechet distance  {scores.frechet:6.2f}   (features of a small classifier; not comparable with FID)")
    print(
        f"{scores.synthetic} synthetic images against {scores.reference} real ones, {scores.seconds:.0f} s. "
        "These scores are computed from the real images: if those are private, so are the scores."
    )
    if json_file is not None:
        privacy = opened.privacy.model_dump(exclude={"events", "statement"})
        command = shlex.join(["dp-sinkhorn", *sys.argv[1:]])
        content = {"protocol": protocol, "against": against, **scores.as_dict(), "privacy": privacy, "command": command}
        _write_json(json_file, content)


@app.command()
def plan(
    records: Annotated[int, typer.Option("--records", metavar="M", help="number of records", show_default=False)],
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="target epsilon")] = None,
    delta: Annotated[float | None, typer.Option("--delta", help="a power of ten below 1/records by default")] = None,
    batch: Annotated[float | None, typer.Option("--batch", metavar="B", help="expected batch size")] = None,
    steps: Annotated[int | None, typer.Option("--steps", metavar="T", help="training steps")] = None,
    noise: Annotated[float | None, typer.Option("--noise", metavar="S", help="noise multiplier sigma")] = None,
    mechanism: Annotated[
        str | None, typer.Option("--mechanism", help="per_record (the default), row, batch, ...")
    ] = None,
    preset: PresetOption = None,
    assignments: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Say what a run would cost, before it: any one of epsilon, noise and steps from the others."""
    from dp_sinkhorn.settings import plan as make_plan

    overrides = _overrides(
        assignments,
        epsilon=epsilon,
        delta=delta,
        batch_size=batch,
        steps=steps,
        noise_multiplier=noise,
        mechanism=mechanism,
    )
    result = make_plan(_settings(preset, overrides), records)
    print(result.model_dump_json(indent=2) if as_json else _plan_text(result))


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False,
) -> None:
    if version:
        print(f"dp-sinkhorn {__version__}")
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    try:
        status = app(args=arguments, prog_name="dp-sinkhorn", standalone_mode=False)
    except UserError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename or 'file system'}: {error.strerror or error}")
    except typer.Abort:
        return INTERRUPTED
    except Exception as error:
        # The parser's own errors share no public base class across versions of typer; they do share these names.
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        message = describe()
        # Called with nothing, the parser has printed the help and has nothing to add.
        return _fail(f"{message} (see dp-sinkhorn --help)") if message else BAD_CALL
    return status if isinstance(status, int) else 0


def _fail(message: str) -> int:
    print("dp-sinkhorn: " + " ".join(message.split()), file=sys.stderr)
    return BAD_CALL


def _overrides(assignments: list[str] | None, **named: Any) -> dict[str, Any]:
    """`--set` assignments, and the options that are settings too, where given."""
    overrides: dict[str, Any] = {}
    for assignment in assignments or []:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set {assignment}: expected KEY=VALUE, for example --set steps=2000")
        overrides[key.strip()] = None if value.strip().lower() in ("null", "none") else value.strip()
    for key, value in named.items():
        if value is not None:
            if key in overrides:
                raise UserError(f"{key} is given twice, as an option and with --set; give it once")
            overrides[key] = value
    return overrides


def _settings(preset: str | None, overrides: dict[str, Any]) -> Settings:
    from dp_sinkhorn.settings import parse_settings

    return parse_settings(preset, overrides)


def _device(name: str) -> torch.device:
    from dp_sinkhorn.devices import pick_device

    return pick_device(name)


def _chosen_labels(count: int | None, per_class: int | None, labels: str | None, total: int) -> list[int]:
    if count is not None and per_class is not None:
        raise UserError("--count and --per-class exclude each other; give one of them")
    for name, value in (("--count", count), ("--per-class", per_class)):
        if value is not None and value < 1:
            raise UserError(f"{name} {value}: draw at least one image")
        if value is not None and value > _MOST_IMAGES:
            raise UserError(f"{name} {value}: draw at most {_MOST_IMAGES} at a time, with other seeds for more")
    try:
        classes = list(range(total)) if labels is None else [int(part) for part in labels.split(",")]
    except ValueError:
        raise UserError(f"--labels {labels}: expected class numbers with commas between, for example 3,5") from None
    if per_class is not None:
        return [label for label in classes for _ in range(per_class)]
    return [classes[k % len(classes)] for k in range(1000 if count is None else count)]


def _plan_text(result: Plan) -> str:
    rows = [
        ("mechanism", result.mechanism),
        ("records", f"{result.records:,}"),
        ("steps", f"{result.steps:,}"),
        ("expected batch", f"{result.batch_size:g}  (sampling rate {result.sampling_rate:.6g})"),
        ("noise multiplier", f"{result.noise_multiplier:g}"),
    ]
    if result.epsilon is None:
        rows.append(("epsilon", "none: this mechanism gives no privacy"))
    else:
        rows.append(("epsilon", f"{result.epsilon:.4g}  at delta = {result.delta:g} (sound; {result.accountant})"))
        if result.epsilon > _VERY_LARGE_EPSILON:
            rows.append(("", "This epsilon is so large that it promises next to nothing: do not rely on it."))
    if result.as_published_epsilon is not None:
        rows.append(
            (
                "as published",
                f"{result.as_published_epsilon:.4g}  (the paper's recipe, RDP; it counts the rows of one step as "
                "independent draws and is NOT a guarantee)",
            )
        )
    return "\n".join(f"{name:<18}{text}" for name, text in rows)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class _Bar:
    """Steps, ε spent and time left; nothing that depends on the records."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as TimeLeft

        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("epsilon {task.fields[epsilon]}"),
            TimeElapsedColumn(),
            TimeLeft(),
            console=Console(stderr=True),
            refresh_per_second=4,
        )
        self._task = self.progress.add_task("training", total=None, epsilon="-")

    def plan(self, result: Plan, done: int) -> None:
        print(_plan_text(result), flush=True)
        self.progress.start()
        self.progress.update(self._task, total=result.steps, completed=done)

    def step(self, done: int) -> None:
        self.progress.update(self._task, completed=done)

    def block(self, reached: Any) -> None:
        spent = "none" if reached.epsilon is None else f"{reached.epsilon:.3g}"
        self.progress.update(self._task, epsilon=spent)


@contextlib.contextmanager
def _progress_bar() -> Iterator[_Bar]:
    bar = _Bar()
    try:
        yield bar
    finally:
        bar.progress.stop()


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C (or SIGTERM) into a wish to stop after the step; a second one stops at once."""
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
