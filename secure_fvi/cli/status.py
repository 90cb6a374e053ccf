"""`secure-fvi status`, `watch` and `audit-log`: how a site or a run stands, and a party's paper trail."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from secure_fvi.cli.keys import home_option

if TYPE_CHECKING:
    from secure_fvi.deployment.status import Status


FILE = click.Path(path_type=Path)


@click.command()
@home_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_context
def status(context: click.Context, home: Path, as_json: bool) -> None:
    """Say how the site in --home stands: roster, jobs, budgets, what expires, what cannot be read; and while a process
    of it runs, at which round of how many its job is, and for whom it waits since when.

    It reads the site's files alone and needs no key. Exits 1 where something cannot be read or does not hang together,
    or where the site's data did not fit the newest job under differential privacy.
    """
    import json

    from secure_fvi.deployment.home import Home
    from secure_fvi.deployment.names import now
    from secure_fvi.deployment.status import read_status

    found = read_status(Home(home), now())
    click.echo(json.dumps(_plain(found), indent=2) if as_json else _text(found))
    if found.problems:
        context.exit(1)


def _plain(found: Status) -> dict[str, Any]:
    from secure_fvi.deployment.names import now

    return {
        **{name: getattr(found, name) for name in ("id", "role", "roster")},
        "quiet": found.quiet(now()),
        "last": found.last.isoformat() if found.last else None,
        "jobs": [
            {
                "job": job.job,
                "state": found.state(job),
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

    lines = [f"'{found.id}', {found.role}, roster {found.roster or 'none'}"]
    for job in found.jobs:
        epsilon = "" if job.fields["epsilon"] is None else f", epsilon {job.fields['epsilon']:g}"
        reason = f": {job.fields['reason']}" if job.fields["reason"] else ""
        lines.append(
            f"  job {job.job}: {found.state(job)}{reason}{epsilon}, {job.exchanges} messages, "
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


# ---- `secure-fvi audit-log`: a party's paper trail, verified and shown ----


@click.group("audit-log")
def audit_log() -> None:
    """The log of what a site was asked and what left it."""


@audit_log.command()
@click.argument("log", type=FILE)
@click.option("--public-key", type=FILE, help="The party's identity.pub, from where you trust it.")
@click.option("--receipts", multiple=True, type=FILE, help="A witness's receipt; may be repeated.")
@click.option("--witness-key", multiple=True, type=FILE, help="Witness's .pub; may be repeated.")
@click.option("--roster", type=FILE, help="A roster file: its signed keys stand for --public-key and --witness-key.")
@click.option("--succession", "successions", multiple=True, type=FILE, help="Of a log that an earlier identity began.")
@click.option("--against", type=FILE, help="The server's log, to compare what both say of the same messages.")
def verify(
    log: Path,
    public_key: Path | None,
    receipts: tuple[Path, ...],
    witness_key: tuple[Path, ...],
    roster: Path | None,
    successions: tuple[Path, ...],
    against: Path | None,
) -> None:
    """Check every row of LOG: hashes, signatures, order. Exits 1 and names the first bad row.

    Rows that were cut off at the end are found by receipts only: those of other members, or those in another's log.
    Whose log it is, and whose the one that it is compared with, is checked where a roster says so.
    """
    from secure_fvi.deployment.consortium import (
        check_signatures,
        keys_of,
        parse_roster,
        read_succession,
        signature_folder,
    )
    from secure_fvi.deployment.names import printable
    from secure_fvi.deployment.trail_verify import check_key, compare
    from secure_fvi.deployment.trail_verify import verify as check
    from secure_fvi.errors import ProtocolError
    from secure_fvi.files import read_bytes
    from secure_fvi.key_files import load_public_key

    shown = [read_bytes(path, "the receipt") for path in receipts]
    accepted = [load_public_key(path) for path in witness_key] or None
    pinned = None if public_key is None else load_public_key(public_key)
    known = [read_succession(read_bytes(path, "the succession"), f"'{path}'") for path in successions]
    members = None
    if roster is not None:
        members = parse_roster(read_bytes(roster, "the roster"), f"'{roster}'")
        check_signatures(members, signature_folder(roster))
        keys = {m.id: keys_of(m, known) for m in members.members.values()}
        accepted = [*(accepted or []), *(key for every in keys.values() for key in every)]
    chain = check(log, pinned, shown, accepted)
    if members is not None and pinned is None:
        check_key(chain, keys[members.member(chain.silo).id])
    click.echo(f"'{printable(chain.silo)}': {chain.length} rows, {len(chain.jobs)} jobs, head {chain.head.hex()}")
    click.echo(f"  key {chain.public_key.hex()}" + ("" if pinned or members else " (not pinned)"))
    if against is not None:
        other = check(against)
        if members is not None:
            if members.member(other.silo).role != "server":
                raise ProtocolError(f"'{against}' is the log of '{other.silo}', which is no server in the roster")
            check_key(other, keys[other.silo])
        else:
            click.echo(f"  compared with a log of '{printable(other.silo)}', key {other.public_key.hex()} (not pinned)")
        found = compare(log, against)
        parties = " and ".join(f"'{printable(name)}'" for name in (found.site, found.server))
        click.echo(f"{parties} agree on {found.agreed} exchanges in {len(found.jobs)} jobs")
        click.echo(f"  {found.lost_answers} answers were lost on the way, {found.unanswered} requests had none")
    count = len(shown) + len(chain.receipts)
    click.echo(f"verified, against {count} {'receipt' if count == 1 else 'receipts'}")


@audit_log.command()
@click.argument("log", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a row.")
@click.option("--last", type=click.IntRange(1), help="Only this many rows, the newest.")
def show(log: Path, as_json: bool, last: int | None) -> None:
    """Show the rows of LOG, as they are stored; `verify` says whether they are genuine."""
    import json

    from secure_fvi.deployment.names import printable
    from secure_fvi.deployment.trail_verify import rows
    from secure_fvi.privacy.chain import timestamp

    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            return value.hex()
        return [plain(v) for v in value] if isinstance(value, list) else value

    party, found = rows(log)
    for row in found[-last:] if last else found:
        fields = {name: plain(value) for name, value in row.fields().items()}
        if as_json:
            about = {"party": party, "row": row.seq, "time": timestamp(row.time), "kind": plain(row.kind)}
            click.echo(json.dumps({**about, **fields, "hash": plain(row.hash)}))
        else:
            said = "  ".join(f"{k} {_short(v)}" for k, v in fields.items() if v not in ("", None))
            click.echo(printable(f"{row.seq!s:>6} {timestamp(row.time)}  {row.kind!s:8} {said}", 20_000))


def _short(value: object) -> str:
    if isinstance(value, list) and len(value) == 2:
        return f"{value[0]} bytes {str(value[1])[:12]}"
    text = str(value)
    return text[:16] if len(text) == 64 else text
