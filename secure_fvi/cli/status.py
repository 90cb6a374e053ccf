"""`secure-fvi status`: how a site stands, on the terminal or for a monitoring system."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from secure_fvi.cli.keys import home_option

if TYPE_CHECKING:
    from secure_fvi.deployment.status import Status


@click.command()
@home_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--serve", metavar="HOST:PORT", help="Answer /metrics (Prometheus) and /health until stopped.")
@click.option(
    "--patience", default=600.0, show_default=True, help="Seconds of quiet in an open job that are ill health."
)
@click.pass_context
def status(context: click.Context, home: Path, as_json: bool, serve: str | None, patience: float) -> None:
    """Say how the site in --home stands: roster, jobs, budgets, what expires, what cannot be read; and while a process
    of it runs, at which round of how many its job is, and for whom it waits since when.

    It reads the site's files alone and needs no key. Exits 1 where something cannot be read or does not hang together,
    or where the site's data did not fit the newest job under differential privacy.
    """
    import json

    from secure_fvi.deployment.home import Home
    from secure_fvi.deployment.names import now
    from secure_fvi.deployment.status import Monitor, Reader
    from secure_fvi.errors import InputError

    site = Home(home)
    if serve is not None:
        host, _, port = serve.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise InputError(f"--serve {serve}: write HOST:PORT, such as 127.0.0.1:9464")
        with Monitor(site, (host, int(port)), patience) as monitor:
            click.echo(f"http://{host}:{monitor.server_port}/metrics and /health (Ctrl-C ends)")
            try:
                monitor.serve_forever()
            except KeyboardInterrupt:
                click.echo()
        return
    found = Reader(site).read(now())
    click.echo(json.dumps(_plain(found), indent=2) if as_json else _text(found))
    if found.problems:
        context.exit(1)


def _plain(found: Status) -> dict[str, Any]:
    from secure_fvi.deployment.status import state_of

    return {
        **{name: getattr(found, name) for name in ("id", "role", "roster")},
        "last": found.last.isoformat() if found.last else None,
        "jobs": [
            {
                "job": job.job,
                "state": state_of(job),
                **{n: getattr(job, n) for n in ("exchanges", "releases", "bytes_received", "bytes_sent")},
                **{n: job.fields[n] for n in ("data_set", "epsilon", "delta", "reason")},
            }
            for job in found.jobs
        ],
        "going": found.going._asdict() if found.going else None,
        "budgets": [budget._asdict() for budget in found.budgets],
        "expiring": list(found.expiring),
        "problems": list(found.problems),
    }


def _text(found: Status) -> str:
    from secure_fvi.deployment.names import format_time, now, printable
    from secure_fvi.deployment.status import state_of

    lines = [f"'{found.id}', {found.role}, roster {found.roster or 'none'}"]
    for job in found.jobs:
        epsilon = "" if job.fields["epsilon"] is None else f", epsilon {job.fields['epsilon']:g}"
        reason = f": {job.fields['reason']}" if job.fields["reason"] else ""
        lines.append(
            f"  job {job.job}: {state_of(job)}{reason}{epsilon}, {job.exchanges} messages, "
            f"{job.bytes_received} bytes in, {job.bytes_sent} out"
        )
    if (going := found.going) is not None:
        what = f"'{printable(going.name, 200)}', job {going.job}: " if going.job else ""
        of = f"round {going.round} of at most {going.rounds} ({going.phase})" if going.round else going.phase
        whom = f"waits for {', '.join(going.waiting)}" if going.waiting else "at work"
        lines.append(f"  now {what}{of}; {whom} since {going.since}")
    elif found.last and found.quiet(now()):
        lines.append(f"  newest row of the log: {format_time(found.last)}")
    lines += [f"  budget of '{b.data_set}': {b.remaining:.3f} left of epsilon {b.epsilon:.3f}" for b in found.budgets]
    lines += [f"! {line}" for line in (*found.expiring, *found.problems)]
    return "\n".join(lines)


# ---- `secure-fvi watch`: a run in a browser on this machine ----


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--port", default=0, show_default="a free one", type=click.IntRange(0, 65535), help="On 127.0.0.1.")
def watch(folder: Path, port: int) -> None:
    """Show the run in FOLDER on a page for this machine alone: rounds, objective, cohort, budgets left.

    The page is read-only. Its link has a token; whoever has the link and an account on this machine sees the page.
    """
    from secure_fvi.runs.watching import Watch

    with Watch(folder, port) as server:
        click.echo(f"open {server.link} (Ctrl-C ends)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo()
