"""`secure-fvi results`: the page of all experiments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from secure_fvi.errors import InputError
from secure_fvi_lab.experiments import REPRODUCTIONS, Row, experiment

_NEEDED = ("name", "paper", "ours", "seconds", "bytes", "machine", "setting")
_HEAD = """# Results

Made by `secure-fvi results {folders} --out FILE` from what `secure-fvi reproduce NAME` wrote, without a hand.
What "ours" is the mean of is said with each experiment; sd: over seeds. Seconds are of machines that had other work to
do, and compare within one experiment only. Bytes are those of messages, or, where an experiment's setting says so,
counted at 8 bytes a number and never sent. `reproduce` that was stopped goes on where it was.

A column or line "paper" has the paper's own numbers: of its data, networks, rounds and splits, which differ from these
as each setting and page says. That a number here is above one there shows nothing about methods; lines of one table, at
equal rounds, can be compared, beside the [floors](#floors): each silo alone, FedAvg and one pooled fit of the same
model. Where a table has errors in sds of a reference and no gap of the bound, the bound was not stored, and nothing is
claimed of it: [six cities by today's code](benchmarks.md#posterior) has both. Numbers are of the commit that is named;
"stored in": the file came with that commit and was measured shortly before it. What has changed in the code since may
change them. Records of vertical-logistic and vertical-poisson, and the people of fedvi-tau and fedvi-writers, are
simulated.

| experiment | ours, mean (sd) | seeds | seconds | bytes a silo |
|---|---:|---:|---:|---:|
"""


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="DIR...")
@click.option("--out", type=click.Path(path_type=Path), help="File for the page (Markdown); stdout without it.")
def results(folders: tuple[Path, ...], out: Path | None) -> None:
    """Write the page of all experiments whose NAME.json lies in DIR..."""
    from secure_fvi.files import write_bytes

    text = page(folders)
    if out is None:
        click.echo(text, nl=False)
        return
    write_bytes(out, text.encode())


def page(folders: Sequence[Path]) -> str:
    """The page. Raises InputError for a folder without files of experiments, and for a file that is none."""
    contents: dict[str, Row] = {}
    for folder in folders:
        files = sorted(folder.glob("*.json"))
        if not files:
            raise InputError(f"{folder}: holds no NAME.json of an experiment; `secure-fvi reproduce` writes them")
        for file in files:
            content = read(file)
            if content["name"] in contents:
                raise InputError(f"{file}: there is another result of '{content['name']}'; keep one")
            contents[content["name"]] = content
    ordered = [contents[name] for name in sorted(contents)]
    head = _HEAD.format(folders=" ".join(folder.as_posix() for folder in folders))
    return head + "".join(map(_line, ordered)) + "".join(map(_section, ordered))


def read(file: Path) -> Row:
    """The content of NAME.json. Raises InputError where it is not what `reproduce` writes."""
    try:
        content: Any = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: not a JSON file") from error
    missing = [key for key in _NEEDED if not isinstance(content, dict) or key not in content]
    if missing:
        raise InputError(f"{file}: has no '{missing[0]}'; is it a file that `secure-fvi reproduce` wrote?")
    if content["name"] not in REPRODUCTIONS:
        raise InputError(f"{file}: '{content['name']}' is no experiment of this version")
    found: Row = content
    return found


def _line(content: Row) -> str:
    ours, name = content["ours"], content["name"]
    spread = f" ({_number(ours['sd'])})" if ours["sd"] is not None and ours["seeds"] > 1 else ""
    quick = ", quick" if content.get("quick") else ""
    return (
        f"| [{name}](#{name}){quick} | {_number(ours['mean'])}{spread} | {ours['seeds']} | {content['seconds']:,.0f} | "
        f"{content['bytes']:,} |\n"
    )


def _section(content: Row) -> str:
    ours, paper = content["ours"], content["paper"]
    lines = [f"\n## {content['name']}\n"]
    if content.get("quick"):
        lines.append("A quick run, which shows that the experiment runs and little more.\n")
    if isinstance(paper, str):
        lines.append(f"- Paper: {paper}.")
    lines += [f"- Ours: {ours['what']}."] if "what" in ours else []
    lines += [f"- Setting: {content['setting']}.", f"- Machine: {content['machine']}."]
    lines += [f"- Commit: {content['commit']}."] if content.get("commit") else []
    table = experiment(content["name"]).table(content)
    # What the list above says already is left out of the table.
    said = (content["setting"], f"paper: {paper}")
    kept = [line.rstrip() for line in table.splitlines() if line not in said]
    return "\n".join([*lines, "", "```text", *kept, "```", ""])


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
