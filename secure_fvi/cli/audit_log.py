"""`secure-fvi audit-log`: a party's paper trail, verified and shown."""

from __future__ import annotations

from pathlib import Path

import click

FILE = click.Path(path_type=Path)


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
    from secure_fvi.deployment.consortium import parse_roster
    from secure_fvi.deployment.names import read_bytes
    from secure_fvi.deployment.rotation import keys_of, read_succession
    from secure_fvi.deployment.signatures import check_signatures, signature_folder
    from secure_fvi.deployment.trail_verify import check_key, compare
    from secure_fvi.deployment.trail_verify import verify as check
    from secure_fvi.errors import ProtocolError
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
    click.echo(f"'{chain.silo}': {chain.length} rows, {len(chain.jobs)} jobs, head {chain.head.hex()}")
    click.echo(f"  key {chain.public_key.hex()}" + ("" if pinned or members else " (not pinned)"))
    if against is not None:
        other = check(against)
        if members is not None:
            if members.member(other.silo).role != "server":
                raise ProtocolError(f"'{against}' is the log of '{other.silo}', which is no server in the roster")
            check_key(other, keys[other.silo])
        else:
            click.echo(f"  compared with a log of '{other.silo}', key {other.public_key.hex()} (not pinned)")
        found = compare(log, against)
        click.echo(f"'{found.site}' and '{found.server}' agree on {found.agreed} exchanges in {len(found.jobs)} jobs")
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
    from typing import Any

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
            about = {"party": party, "row": row.seq, "time": timestamp(row.time), "kind": row.kind}
            click.echo(json.dumps({**about, **fields, "hash": row.hash.hex()}))
        else:
            said = "  ".join(f"{k} {_short(v)}" for k, v in fields.items() if v not in ("", None))
            click.echo(printable(f"{row.seq:6} {timestamp(row.time)}  {row.kind:8} {said}", 20_000))


def _short(value: object) -> str:
    if isinstance(value, list) and len(value) == 2:
        return f"{value[0]} bytes {str(value[1])[:12]}"
    text = str(value)
    return text[:16] if len(text) == 64 else text
