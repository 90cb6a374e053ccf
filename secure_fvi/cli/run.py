"""`secure-fvi run`: a configured fit, from the file to the report; `secure-fvi report`: a signed one, checked."""

from __future__ import annotations

from pathlib import Path

import click

FILE = click.Path(path_type=Path)


@click.command()
@click.argument("config", type=FILE)
@click.option("--out", required=True, type=FILE, help="Folder for the results; new or empty.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key, such as seed=7.")
@click.option("--data", type=FILE, envvar="SECURE_FVI_DATA", help="Folder of data sets.")
@click.option("--resume", is_flag=True, help="Continue the run that --out holds.")
@click.option("--quiet", is_flag=True, help="No progress, no table.")
@click.pass_context
def run(
    context: click.Context,
    config: Path,
    out: Path,
    overrides: tuple[str, ...],
    data: Path | None,
    resume: bool,
    quiet: bool,
) -> None:
    """Fit the model that CONFIG (a TOML file) describes; all parties run in this process.

    Writes result.json, posterior.safetensors, metrics.jsonl and report.html to the folder --out. Exits 4 where the run
    ended without converging; the files are written all the same.
    """
    from secure_fvi.runs.reading import read

    settings = read(config, overrides)  # before PyTorch is loaded: what is wrong with the file is said at once

    from secure_fvi.runs.directory import RunDirectory

    folder = RunDirectory(out)
    if not resume or folder.state == "empty":
        folder.check_new()
    else:
        folder.check_writable()

    from secure_fvi.cli.tables import exit_code, print_result
    from secure_fvi.progress import RunProgress
    from secure_fvi.runs.running import execute

    if resume and folder.state == "empty":
        click.echo(f"secure-fvi: '{out}' holds no run to continue: one begins", err=True)
    with RunProgress(quiet) as progress:
        result = execute(settings, folder, data, resume, progress.update)
    if result is None:
        click.echo(f"the run in '{out}' is finished; its results are in {out / 'result.json'}")
        context.exit(exit_code(folder.read_result()))
    if not quiet:
        print_result(result)
        for party, rows in result.metrics.get("alignment", {}).items():
            left_out = sum(rows.values()) - rows["matched"]
            click.echo(f"{party}: {rows['matched']} rows matched, {left_out} left out")
        if settings.vertical:
            click.echo(f"each silo's own posterior, for its eyes alone: a file in {out / 'silos'}")
        click.echo(f"report: {out / 'report.html'}")
    context.exit(exit_code(result.to_json()))


@click.group()
def report() -> None:
    """The report of a run between institutions."""


@report.command()
@click.argument("page", metavar="REPORT", type=FILE)
@click.option(
    "--home", type=FILE, envvar="SECURE_FVI_HOME", help="A member's folder: its rosters, its log, its policy."
)
@click.option("--roster", type=FILE, help="A roster file, its signatures beside it; without a member's folder.")
@click.option("--log", "logs", multiple=True, type=FILE, help="A member's audit log, to be held against the report.")
def verify(page: Path, home: Path | None, roster: Path | None, logs: tuple[Path, ...]) -> None:
    """Check REPORT, the page, by the server's signature in report.sig, which lies beside it as evidence.json has to;
    of the run's other files, those that lie there. Exits 1 and says what is wrong.

    At a site it says as well whether the report has this site's own log and policy right.
    """
    from secure_fvi.cli.keys import open_home
    from secure_fvi.deployment.consortium import check_signatures, parse_roster, signature_folder
    from secure_fvi.deployment.deciding import stated_policy
    from secure_fvi.deployment.evidence import check_log, check_report, signed_under
    from secure_fvi.deployment.names import printable
    from secure_fvi.errors import InputError, ProtocolError
    from secure_fvi.files import read_bytes

    site = open_home(home) if home is not None and roster is None else None
    if site is not None:
        under = signed_under(page)
        found = next((r for r in site.accepted_rosters() if r.hash.hex() == under), None)
        if found is None:
            raise ProtocolError(f"the report was signed under roster {under[:16]}..., which was never in force here")
        roster = site.roster_file(found.serial)
    elif roster is not None:
        found = parse_roster(read_bytes(roster, "the roster"), f"'{roster}'")
    else:
        raise InputError("--roster: a roster file, or --home: a member's folder, says whose signature counts")
    check_signatures(found, signature_folder(roster))
    checked = check_report(page, found)
    evidence = checked.evidence
    click.echo(
        f"job {printable(evidence.job)}, signed by '{checked.member}' at {checked.time} under roster {found.serial}"
    )
    click.echo(f"  as signed: {printable(', '.join(checked.files), 4000)}")
    if checked.absent:
        click.echo(f"  signed, and not here: {printable(', '.join(checked.absent), 4000)}")
    versions = evidence.versions
    said = printable(versions.secure_fvi, 40)
    click.echo(f"  secure-fvi {said}, package {versions.package}, protocol {versions.protocol}")
    click.echo(f"  model {evidence.model}")
    for log in (*logs, *([site.log_file] if site is not None and site.log_file.exists() else ())):
        party, policies = check_log(evidence, log)
        under = f"; policy {', then '.join(policy.hex() for policy in policies)}" if policies else ""
        click.echo(
            f"  the log of '{printable(party)}' goes through the report's head, row {evidence.logs[party].rows}{under}"
        )
        if site is not None and party == site.id and party in evidence.policies:
            if evidence.policies[party] not in {stated_policy(site, evidence.job, p).hex() for p in policies}:
                raise ProtocolError(f"the report has another policy of '{party}' than its log")
            click.echo("  this site's policy is the report's")
    click.echo("verified")
