"""`millstream pipeline`: what Spark does with messages."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer
from rich.markup import escape
from rich.text import Text

from millstream.cli.arguments import parse_pairs
from millstream.cli.bundles import Commands
from millstream.cli.confirm import YesOption, confirm
from millstream.cli.connection import (
    NamespaceOption,
    NamespaceOptions,
    given_credentials,
)
from millstream.cli.failure import ExitCode, UsageProblem
from millstream.cli.findings import report
from millstream.cli.output import (
    JsonOption,
    bytes_text,
    count_text,
    document_of,
    duration_text,
    examples,
    plural,
    print_done,
    print_facts,
    print_json,
    print_table,
    stderr,
    stdout,
    time_text,
)
from millstream.cli.terminal import terminal_safe
from millstream.errors import ConfigInvalid, StartFailed
from millstream.names import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    from millstream.client.pipelines import PipelineInfo

app = Commands(no_args_is_help=True, help="Run Spark pipelines on messages, and check whether Spark works here.")

_CONNECTION: Final = "Connection"

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The pipeline, in YAML.", show_default=False)]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The pipeline's name.", show_default=False)]
GivenBrokerOption = Annotated[
    str | None,
    typer.Option(
        "--broker",
        "-b",
        envvar="MILLSTREAM_BROKER",
        metavar="HOST:PORT",
        help="The broker to work with, instead of the one that the file names.",
        rich_help_panel=_CONNECTION,
    ),
]
GivenNamespaceOption = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-n",
        envvar="MILLSTREAM_NAMESPACE",
        metavar="NAME",
        help="The namespace to work in, instead of the one that the file names.",
        rich_help_panel=_CONNECTION,
    ),
]


@app.command(
    epilog=examples(
        "millstream pipeline run clean-orders.yaml",
        "# everything that is there now, then end",
        "millstream pipeline run clean-orders.yaml --available-now",
        "# on a cluster, a line of JSON for each batch",
        "millstream pipeline run clean-orders.yaml --master spark://spark-1:7077 --json",
        "millstream pipeline run clean-orders.yaml --conf spark.executor.memory=4g",
    )
)
def run(
    file: FileArgument,
    available_now: Annotated[
        bool, typer.Option("--available-now", help="Process what is there now, then end.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Process a single batch, then end.")] = False,
    master: Annotated[
        str | None,
        typer.Option(
            "--master", metavar="URL", help="Where Spark runs, such as local[4] or spark://HOST:PORT (local[*])."
        ),
    ] = None,
    conf: Annotated[
        list[str] | None,
        typer.Option("--conf", metavar="KEY=VALUE", help="A setting of Spark; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each batch.")] = False,
    broker: GivenBrokerOption = None,
    namespace: GivenNamespaceOption = None,
) -> int:
    """Run a pipeline until it is stopped by Ctrl-C, SIGTERM, `millstream pipeline stop` or the dashboard.

    It ends after the batch that is under way, and continues from there when it is started again.

    After a failure it restarts itself, as the file says. The exit code is 1 if it fails for good.

    Spark's own log is off; MILLSTREAM_SPARK_LOG=WARN (or INFO, ERROR) sends it to standard error.
    """
    if available_now and once:
        raise UsageProblem("--available-now and --once exclude each other")
    until: Literal["stopped", "available-now", "once"] = (
        "available-now" if available_now else "once" if once else "stopped"
    )
    _require("pyspark", "pyarrow", "numpy")
    from millstream.cli.pipeline_run import run_pipeline  # here: others of this room need no Spark
    from millstream.spark.pipelines.loading import load_pipeline

    credentials = {name: value for name, value in given_credentials().items() if value is not None}
    checked = load_pipeline(file, broker=broker, namespace=namespace, credentials=credentials)
    settings = parse_pairs(conf or [], "--conf")
    standing = run_pipeline(checked, until=until, master=master, conf=settings, as_json=as_json)
    if standing.state == "finished" and checked.report is not None and not as_json:
        stdout.print(f"the report is {checked.report}", markup=False, soft_wrap=True)
    return ExitCode.REQUEST if standing.state == "failed" else ExitCode.OK


@app.command(
    epilog=examples("millstream pipeline validate clean-orders.yaml", "millstream pipeline validate *.yaml --json")
)
def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Pipelines, in YAML.", show_default=False)],
    as_json: JsonOption = False,
) -> int:
    """Check pipelines for mistakes without starting Spark.

    The exit code is 2 if there are any.
    """
    _require("pyarrow", "numpy")
    from millstream.spark.pipelines.graph import queries_of
    from millstream.spark.pipelines.loading import check_pipeline

    rows = []
    for file in files:
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as problem:
            raise ConfigInvalid(f"{file} cannot be read: {getattr(problem, 'strerror', None) or problem}") from None
        checked, mistakes = check_pipeline(text, file.resolve().parent)
        rows.append({"file": str(file), "valid": checked is not None, "mistakes": mistakes})
        if as_json:
            continue
        if checked is None:
            for mistake in mistakes:
                stdout.print(f"{file} {mistake}", markup=False, soft_wrap=True)
        else:
            names = ", ".join(query.name for query in queries_of(checked.graph))
            said = f"{file}: {checked.definition.name} reads {', '.join(checked.topics_read())} and writes "
            said += f"{', '.join(checked.topics_written())}{f' ({names})' if names else ''}"
            stdout.print(said, markup=False, soft_wrap=True)
    if as_json:
        print_json(rows)
    return ExitCode.OK if all(row["valid"] for row in rows) else ExitCode.USAGE


@app.command("list", epilog=examples("millstream pipeline list", "millstream pipeline list --json"))
def list_pipelines(*, given: NamespaceOptions) -> None:
    """List the pipelines that report to a broker, wherever they run."""
    with given.client() as client:
        found = client.pipelines.list()
    if given.as_json:
        print_json([document_of(info) for info in found])
        return
    print_table(
        ("pipeline", "state", "reads", "writes", "rows", "rows/s", "lag", "restarts", "last error"),
        [
            (
                info.name,
                _state(info),
                ", ".join(info.sources),
                ", ".join(info.sinks),
                info.rows,
                f"{info.rows_per_s:,.0f}",
                None if info.lag < 0 else info.lag,
                info.restarts,
                info.error,
            )
            for info in found
        ],
        empty="no pipeline has reported; `millstream pipeline run FILE` starts one",
        numbers="rows|rows/s|lag|restarts",
    )


@app.command(
    epilog=examples("millstream pipeline status clean-orders", "millstream pipeline status clean-orders --json")
)
def status(name: NameArgument, *, given: NamespaceOptions) -> None:
    """Show a pipeline: its state, how far it is, and what went wrong."""
    with given.client() as client:
        _print_one(client.pipelines.show(name), given.as_json)


@app.command(epilog=examples("millstream pipeline stop clean-orders"))
def stop(name: NameArgument, *, given: NamespaceOptions) -> None:
    """Stop a pipeline after the batch that is under way.

    It learns within seconds that it should stop.
    """
    with given.client() as client:
        info = client.pipelines.stop(name)
    if given.as_json:
        print_json(document_of(info))
    elif info.state not in ("stopped", "finished", "failed"):
        stdout.print(f"[bold]{info.name}[/] stops after the batch that is under way")
    else:
        stdout.print(f"[bold]{info.name}[/] does not run: it is {info.state}")


@app.command(
    epilog=examples("millstream pipeline forget clean-orders", "millstream pipeline forget clean-orders --force -y")
)
def forget(
    name: NameArgument,
    force: Annotated[bool, typer.Option("--force", help="Remove it even if it says that it runs.")] = False,
    yes: YesOption = False,
    *,
    given: NamespaceOptions,
) -> None:
    """Remove a pipeline that does not run from the list.

    Its checkpoint stays where it is.
    """
    confirm(f"Forget the pipeline {name}?", yes=yes)
    with given.client() as client:
        client.pipelines.forget(name, force=force)
    print_done(f"forgot pipeline [bold]{name}[/]", as_json=given.as_json, pipeline=name, forgotten=True)


@app.command(
    epilog=examples("millstream pipeline stages", "millstream pipeline stages --json | jq 'map(.bytes) | add'")
)
def stages(
    query: Annotated[
        str,
        typer.Argument(metavar="[QUERY]", help="Only what this query has staged; without it, what all queries have."),
    ] = "",
    *,
    given: NamespaceOptions,
) -> None:
    """List what Spark queries have staged and not published.

    It expires after stages.ttl_ms, a day.
    """
    with given.client() as client:
        found = client.pipelines.stages(query)
    if given.as_json:
        print_json(document_of(found))
        return
    print_table(
        ("query", "batch", "task", "messages", "size", "topics", "opened", "expires"),
        [
            (
                one.query,
                stage.batch,
                stage.task,
                stage.messages,
                bytes_text(stage.bytes),
                ", ".join(stage.topics),
                time_text(stage.opened_ms),
                time_text(stage.expires_ms),
            )
            for one in found
            for stage in one.stages
        ],
        empty="nothing is staged",
        numbers="batch|task|messages|size",
    )


@app.command(
    epilog=examples(
        "# which query, which batch", "millstream pipeline stages", "millstream pipeline abort 5f1c0d7e-query 12 --yes"
    )
)
def abort(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="The query, as `pipeline stages` names it.")],
    batch: Annotated[int, typer.Argument(metavar="BATCH", min=0, help="The batch of the query.")],
    yes: YesOption = False,
    *,
    given: NamespaceOptions,
) -> None:
    """Forget what is staged for a batch.

    A query that still runs does the batch again. A batch that is published stays published.
    """
    confirm(f"Forget what is staged for batch {batch} of {query}?", yes=yes)
    with given.client() as client:
        answer = client.pipelines.abort(query, batch)
    if answer.published:
        said = f"batch {batch} is published, and stays so"
    else:
        said = f"forgot {plural(answer.aborted, 'stage')} of batch {batch}"
    print_done(said, as_json=given.as_json, query=query, batch=batch, **document_of(answer))


def _print_one(info: PipelineInfo, as_json: bool) -> None:
    if as_json:
        print_json(document_of(info))
        return
    print_facts(
        [
            ("pipeline", Text(info.name, style="bold")),
            ("state", Text.assemble(_state(info), ", told to stop" if info.stop_wished else "")),
            ("reads", ", ".join(info.sources)),
            ("writes", ", ".join(info.sinks)),
            ("rows", f"{info.rows:,}, {info.rows_per_s:,.0f} per second"),
            ("lag", None if info.lag < 0 else count_text(info.lag)),
            ("last batch", None if info.batch < 0 else f"{info.batch:,}, took {duration_text(info.batch_ms)}"),
            ("restarts", count_text(info.restarts)),
            ("last error", info.error),
            ("runs on", f"{info.host}, process {info.pid}" if info.host else None),
            ("started", time_text(info.started_ms) if info.started_ms else None),
            ("last report", time_text(info.reported_ms)),
        ]
    )
    description = info.definition.get("description")
    if description:
        stderr.print(f"[dim]{escape(terminal_safe(str(description)))}[/]")


def _state(info: PipelineInfo) -> Text:
    styles = {"running": "green", "waiting": "green", "finished": "green", "failed": "bold red", "lost": "bold red"}
    return Text(info.state, style=styles.get(info.state, "yellow"))


@app.command(
    epilog=examples(
        "# can Spark start here, with which Java, and does it read?",
        "millstream pipeline doctor",
        "# the same with messages of a broker that is there",
        "millstream pipeline doctor --broker broker-1:9092",
        "millstream pipeline doctor --json",
    )
)
def doctor(
    broker: Annotated[
        str | None,
        typer.Option(
            "--broker",
            "-b",
            envvar="MILLSTREAM_BROKER",
            metavar="HOST:PORT",
            help="The broker to read from. Without it, one is started for this and thrown away.",
        ),
    ] = None,
    namespace: NamespaceOption = DEFAULT_NAMESPACE,
    as_json: JsonOption = False,
) -> None:
    """Check whether Spark can start here and with which Java, start it, and read a batch with it.

    The exit code is 1 if anything fails.
    """
    from millstream.spark.doctor import examine  # here: others of this room need no Spark

    options: dict[str, str] = {}
    if broker is not None:
        given = {"bootstrap.servers": broker, "namespace": namespace, **given_credentials()}
        options = {name: value for name, value in given.items() if value is not None}
    if stderr.is_terminal:
        stderr.print("[dim]starts Spark, which takes a while[/]")
    report(
        list(examine(options)),
        as_json=as_json,
        summary=lambda counts: (
            "Something is to be done." if counts["warn"] or counts["fail"] else "Spark reads Millstream here."
        ),
    )


def _require(*packages: str) -> None:
    """What pipelines are made of is an extra, which not everybody has installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise StartFailed(f"pipelines need {', '.join(missing)}: `pip install 'millstream[spark,jdk]'`")
