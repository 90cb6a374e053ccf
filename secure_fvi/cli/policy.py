"""`secure-fvi policy`: what a site takes part in."""

from __future__ import annotations

from pathlib import Path

import click

from secure_fvi.cli.keys_shared import home_option

FILE = click.Path(path_type=Path)


@click.group()
def policy() -> None:
    """A site's policy: begin one, check it, hash a model for it."""


@policy.command()
@home_option
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def init(home: Path, debug: bool) -> None:
    """Write a policy that allows nothing, to be edited."""
    from secure_fvi.deployment.policy import write_template

    write_template(home / "policy.toml")
    click.echo(f"{home / 'policy.toml'}: allows nothing yet; edit it")


@policy.command()
@home_option
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def check(home: Path, debug: bool) -> None:
    """Read the policy as a job would and say what it allows."""
    from secure_fvi.deployment.policy import read_policy

    found = read_policy(home / "policy.toml")
    p = found.privacy
    click.echo(f"policy {found.hash.hex()}")
    for what, names in (
        ("rosters", [r.hex()[:16] for r in found.rosters]),
        ("models", [h.hex()[:16] for h in found.models]),
        ("algorithms", found.algorithms),
        ("aggregations", found.aggregations),
        ("data sets", list(found.data)),
    ):
        click.echo(f"  {what}: {', '.join(names) or 'none'}")
    click.echo(f"  at least {found.min_cohort} silos, at most {found.max_rounds} rounds")
    click.echo(
        f"  differential privacy {p.dp}: {' or '.join(p.units)}, epsilon at most {p.max_epsilon:g} at delta at most "
        f"{p.max_delta:g}, noise multiplier at least {p.min_noise_multiplier:g}"
    )


@policy.command("hash-model")
@click.argument("config", type=FILE)
@click.option("--function", "installed", metavar="FILE.py:NAME", help="This site's copy, where CONFIG names another.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the configuration.")
@click.option("--json", "as_json", is_flag=True, help="Print all that the hash is over.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def hash_model(config: Path, installed: str | None, overrides: tuple[str, ...], as_json: bool, debug: bool) -> None:
    """Print the hash of the model in CONFIG, a job's configuration: source, imports, bounds and versions here."""
    import json

    from secure_fvi.deployment.model_hash import manifest
    from secure_fvi.runs.config import read

    found = manifest(read(config, overrides), installed)
    if as_json:
        about = {"sources": found.sources, "versions": found.versions, "settings": found.settings}
        click.echo(json.dumps({"hash": found.hash.hex(), **about}, indent=2))
        return
    click.echo(found.hash.hex())
    click.echo(f"over {', '.join(found.sources)}", err=True)
    click.echo(f"with {', '.join(f'{k} {v}' for k, v in found.versions.items())}", err=True)
    click.echo(f"and {', '.join(f'{k} = {v}' for k, v in found.settings.items())}", err=True)
