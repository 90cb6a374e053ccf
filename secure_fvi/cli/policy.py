"""`secure-fvi policy`: what a site takes part in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from secure_fvi.cli.keys_shared import home_option, open_home

if TYPE_CHECKING:
    from secure_fvi.deployment.policy import SitePolicy

FILE = click.Path(path_type=Path)
_installed = click.option(
    "--function", "installed", metavar="FILE.py:NAME", help="This site's copy, where CONFIG names another."
)
_overrides = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the configuration."
)


@click.group()
def policy() -> None:
    """A site's policy: begin one, check it, hash a model for it, and say what a job discloses."""


@policy.command()
@home_option
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def init(home: Path, debug: bool) -> None:
    """Write a policy that allows nothing, to be edited."""
    from secure_fvi.deployment.policy import write_template

    write_template(home / "policy.toml")
    click.echo(f"{home / 'policy.toml'}: allows nothing yet; edit it")


@policy.command()
@click.argument("config", type=FILE, required=False)
@home_option
@_installed
@_overrides
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def check(config: Path | None, home: Path, installed: str | None, overrides: tuple[str, ...], debug: bool) -> None:
    """Read the policy as a job would and say what it allows; with CONFIG, whether it would take part in that job."""
    from secure_fvi.deployment.policy import read_policy

    found = read_policy(home / "policy.toml")
    if config is not None:
        _judge(home, found, config, installed, overrides)
        return
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
    share = "all" if found.share == 1 else f"{found.share:g}"
    click.echo(f"  disclosures: {', '.join(found.disclosures) or 'none'}")
    package = found.package if isinstance(found.package, str) else ", ".join(d[:16] for d in found.package)
    click.echo(f"  sandbox {found.sandbox}, the server's secure_fvi {package}")
    click.echo(f"  at least {found.min_cohort} silos, {share} of the roster's; at most {found.max_rounds} rounds")
    click.echo(
        f"  differential privacy {p.dp}: {' or '.join(p.units)}, epsilon at most {p.max_epsilon:g} at delta at most "
        f"{p.max_delta:g}, noise multiplier at least {p.min_noise_multiplier:g}"
    )


def _judge(home: Path, found: SitePolicy, config: Path, installed: str | None, overrides: tuple[str, ...]) -> None:
    """Judge CONFIG as an offer of it would be, but for its signature. Raises PolicyError with every reason against."""
    from secure_fvi.deployment.job import make_offer, silo_ids
    from secure_fvi.deployment.model_hash import manifest
    from secure_fvi.deployment.names import now
    from secure_fvi.deployment.policy_check import check as judge
    from secure_fvi.runs.config import read

    site, job = open_home(home), read(config, overrides).model_copy(update={"engine": None})
    roster, model = site.roster(now()), manifest(job, installed).hash
    offer = make_offer(job, roster, roster.of_role("server")[0].id, model, now(), config.stem, silos=silo_ids(job))
    judge(offer, found, site.role, roster)
    click.echo(f"'{config}': this site would take part")


@policy.command()
@click.argument("config", type=FILE)
@click.option("--with-data", is_flag=True, help="Read all silos' data and trace the model, for blocks and noise.")
@click.option("--data-dir", type=FILE, envvar="SECURE_FVI_DATA", help="Folder of data sets of shipped programs.")
@_overrides
@click.option("--json", "as_json", is_flag=True, help="Print it for programs.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def explain(
    config: Path, with_data: bool, data_dir: Path | None, overrides: tuple[str, ...], as_json: bool, debug: bool
) -> None:
    """Say in words what the job that CONFIG describes discloses, to whom, how often, and what a policy has to list."""
    import json

    from secure_fvi.disclosure import check_carried
    from secure_fvi.runs.config import Engine, read
    from secure_fvi.runs.federation import disclosure_of

    job = read(config, overrides)
    found = disclosure_of(job, data_dir, with_data)
    check_carried(found, job.engine or Engine())
    click.echo(json.dumps(found.to_json(), indent=2) if as_json else "\n".join(found.lines()))


@policy.command("hash-model")
@click.argument("config", type=FILE)
@_installed
@_overrides
@click.option("--json", "as_json", is_flag=True, help="Print all that the hash is over.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def hash_model(config: Path, installed: str | None, overrides: tuple[str, ...], as_json: bool, debug: bool) -> None:
    """Print the hash of the model in CONFIG, a job's configuration: source, imports, bounds and versions here."""
    import json

    from secure_fvi.deployment.model_hash import manifest
    from secure_fvi.runs.config import read

    found = manifest(read(config, overrides), installed)
    if as_json:
        about = {
            "sources": found.sources,
            "versions": found.versions,
            "settings": found.settings,
            "package": found.package.hex(),
        }
        click.echo(json.dumps({"hash": found.hash.hex(), **about}, indent=2))
        return
    click.echo(found.hash.hex())
    click.echo(f"over {', '.join(found.sources)}", err=True)
    click.echo(f"with {', '.join(f'{k} {v}' for k, v in found.versions.items())}", err=True)
    click.echo(f"and {', '.join(f'{k} = {v}' for k, v in found.settings.items())}", err=True)
    click.echo(f"of the secure_fvi {found.package.hex()}", err=True)
