"""`secure-fvi policy`: what a site takes part in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import click

from secure_fvi.cli.keys import home_option, open_home
from secure_fvi.cli.serving import sandbox_option

if TYPE_CHECKING:
    from secure_fvi.deployment.deciding import Decision
    from secure_fvi.deployment.home import Home
    from secure_fvi.deployment.policy import SitePolicy
    from secure_fvi.disclosure import Disclosure, Phase
    from secure_fvi.runs.config import Config

FILE = click.Path(path_type=Path)
_Command = TypeVar("_Command", bound=Callable[..., Any])
_installed = click.option(
    "--function",
    "installed",
    metavar="FILE.py:NAME",
    help="This site's copy, where CONFIG names another; in a vertical job this silo's own predictor.",
)


class Asked(NamedTuple):
    """A job's configuration as a command line names it. overrides: KEY=VALUE."""

    path: Path
    overrides: tuple[str, ...]

    def __str__(self) -> str:
        return f"'{self.path}'"

    def job(self) -> Config:
        from secure_fvi.runs.reading import read
        from secure_fvi.runs.records import settled

        return settled(read(self.path, self.overrides))


def _asked(required: bool = True) -> Callable[[_Command], _Command]:
    """CONFIG with its --set, as one `Asked`; None where neither is given."""

    def keep(context: click.Context, _: click.Parameter, overrides: tuple[str, ...]) -> None:
        context.meta[__name__] = overrides

    def both(context: click.Context, _: click.Parameter, path: Path | None) -> Asked | None:
        return None if path is None else Asked(path, context.meta[__name__])

    overrides = click.option(
        "--set", multiple=True, metavar="KEY=VALUE", is_eager=True, expose_value=False, callback=keep,
        help="Override a key of the configuration.",
    )  # fmt: skip
    config = click.argument("config", type=FILE, required=required, callback=both)
    return lambda command: config(overrides(command))


@click.group()
def policy() -> None:
    """A site's policy: begin one, allow a job, check it, hash a model for it, and say what a job discloses."""


@policy.command()
@home_option
def init(home: Path) -> None:
    """Write a policy that allows nothing, to be edited."""
    from secure_fvi.deployment.keeping import write_template

    write_template(home / "policy.toml")
    click.echo(f"{home / 'policy.toml'}: allows nothing yet; edit it")


@policy.command()
@_asked(required=False)
@home_option
@_installed
def check(config: Asked | None, home: Path, installed: str | None) -> None:
    """Read the policy as a job would and say what it allows; with CONFIG, whether it would take part in that job."""
    from secure_fvi.deployment.policy import read_policy

    found = read_policy(home / "policy.toml")
    if config is not None:
        _judge(home, found, config, installed)
        click.echo(f"{config}: this site would take part")
        return
    p = found.privacy
    _say_line(f"policy {found.hash.hex()}")
    for what, names in (
        ("rosters", [r.hex()[:16] for r in found.rosters]),
        ("models", [h.hex()[:16] for h in found.models]),
        ("formulas", [text for rule in found.formulas for text in rule.formulas]),
        ("algorithms", found.algorithms),
        ("aggregations", found.aggregations),
        ("data sets", list(found.data)),
    ):
        _say_line(f"  {what}: {', '.join(names) or 'none'}")
    share = "all" if found.share == 1 else f"{found.share:g}"
    _say_line(f"  disclosures: {', '.join(found.disclosures) or 'none'}")
    package = found.package if isinstance(found.package, str) else ", ".join(d[:16] for d in found.package)
    _say_line(f"  sandbox {found.sandbox}, the server's secure_fvi {package}")
    _say_line(f"  at least {found.min_cohort} silos, {share} of the roster's; at most {found.max_rounds} rounds")
    _say_line(
        f"  differential privacy {p.dp}: {' or '.join(p.units)}, epsilon at most {p.max_epsilon:g} at delta at most "
        f"{p.max_delta:g}, noise multiplier at least {p.min_noise_multiplier:g}"
    )


def _judge(home: Path, found: SitePolicy, config: Asked, installed: str | None) -> Decision:
    """Judge CONFIG as an offer of it would be, but for its signature and what it costs. Raises PolicyError with every
    reason against, and InputError where it is not this site's job."""
    from secure_fvi.deployment.deciding import Decision, check_records
    from secure_fvi.deployment.job import make_offer, silo_ids
    from secure_fvi.deployment.model_hash import manifest
    from secure_fvi.deployment.names import now
    from secure_fvi.deployment.policy_check import check as judge
    from secure_fvi.deployment.status import follow_log
    from secure_fvi.deployment.trail import TrailChain
    from secure_fvi.errors import InputError

    site, job = open_home(home), config.job().model_copy(update={"engine": None})
    silos = silo_ids(job)
    if site.role == "silo" and silos is not None and site.id not in silos:
        raise InputError(f"{config} does not ask this site, '{site.id}', but {', '.join(silos)}")
    roster, model = site.roster(now()), manifest(job, installed).hash
    offer = make_offer(job, roster, roster.of_role("server")[0].id, model, now(), config.path.stem)
    rule = judge(offer, found, site.role, roster, site.id)
    named = [] if rule is None else [p for p in (rule.path, *rule.tables.values()) if p is not None]
    if gone := next((path for path in named if not os.access(path, os.R_OK)), None):
        raise InputError(
            f"there is no file '{gone}' that can be read, which the policy names, so the job would be refused"
        )
    if site.role == "silo":
        log = TrailChain(site.id)
        follow_log(site, log)
        check_records(site, offer, log, found, rule)
    return Decision(offer, roster, found, rule)


@policy.command()
@_asked()
@click.option("--with-data", is_flag=True, help="Read all silos' data and trace the model, for blocks and noise.")
@click.option("--data-dir", type=FILE, envvar="SECURE_FVI_DATA", help="Folder of data sets of shipped programs.")
@sandbox_option
def explain(config: Asked, with_data: bool, data_dir: Path | None, sandbox: Literal["required", "off"]) -> None:
    """Say in words what the job that CONFIG describes discloses, to whom, how often, and what a policy has to list."""
    from secure_fvi.disclosure import check_carried
    from secure_fvi.runs.config import Engine
    from secure_fvi.runs.federation import disclosure_of

    job = config.job()
    model = None
    if with_data and not job.vertical:
        from secure_fvi.deployment.fence import model_for
        from secure_fvi.deployment.policy import files_of

        model, _ = model_for(job, sandbox, None, None, *files_of(job))
    found = disclosure_of(job, data_dir, model)
    check_carried(found, job.engine or Engine())
    _say([*_formula_lines(job), *_alignment_lines(job), *disclosure_lines(found)])


def _say(lines: list[str]) -> None:
    """What somebody else's job says, line by line: nothing of it moves the terminal's cursor or hides a line."""
    for line in lines:
        _say_line(line)


def _say_line(line: str, err: bool = False) -> None:
    from secure_fvi.deployment.names import printable

    click.echo(printable(line, 20_000), err=err)


def _formula_lines(job: Config) -> list[str]:
    """A job's formula in words, and what a policy has to say to allow it; none for another model."""
    from secure_fvi.deployment.policy import rule_of
    from secure_fvi.runs import wording
    from secure_fvi.runs.records import formula_model

    if job.model.formula is None:
        return []
    rule = [line for line in wording.dumps({"model": [rule_of(job.model)]}).splitlines() if line]
    return [*formula_model(job.model).describe(), "a policy allows this formula, and no code, by:", *rule, ""]


def _alignment_lines(job: Config) -> list[str]:
    """How the people of a vertical job are found, and what that tells whom; none for another job."""
    if job.alignment is None:
        return []
    rules = job.alignment.options.get("rules", ["text"])
    by = f"people are found by {', '.join(job.alignment.columns)} ({', '.join(rules)})"
    others = {k: v for k, v in job.alignment.options.items() if k != "rules"}
    by += "".join(f", {key} = {value!r}" for key, value in sorted(others.items()))
    if job.alignment.how == "sorted":
        return [
            f"{by}, in files that are sorted by it already",
            "  the server, all silos and, where sums have one, the key holder learn how many people there are, and a "
            "digest of their identifiers: whoever guesses all of these can tell that the guess is right",
            "a policy allows this by 'alignment' of its data set",
        ]
    listed = job.response is not None and job.response.data is not None  # the server has a list too, of its own file
    return [
        f"{by}, matched in private before the first round (docs/vertical-alignment.md)",
        "  the server learns how many people each party holds, and how many all or some of them hold"
        f"{', and of each person in its own file which silos hold it' if listed else ''}; a silo learns which of its "
        "own people all hold, and from two jobs of which one lacks a silo, as where it left, whom that one lacks",
        f"  each other {'party, the server too,' if listed else 'silo'} tests as many identifiers against this site's "
        f"as it committed to before: all together at most {len(job.silo) - 1 + listed} times 'largest' in each of "
        "'matchings' jobs",
        "  the server compares the lists, and so names whom all hold: it may leave out whom it likes, but for 'fewest'",
        "a policy allows this by 'alignment' of its data set",
    ]


@policy.command()
@_asked()
@home_option
@click.option("--data", "table", type=FILE, help="This site's table or file for the job's data set.")
@click.option("--dictionary", type=FILE, help="Its dictionary; that of a job by formula unless given.")
@click.option("--query", metavar="SQL", help="One SELECT over the table, which it calls data.")
@click.option("--missing", type=click.Choice(["refuse", "drop"]), default="refuse", show_default=True, help="Of gaps.")
@click.option("--without-dp", is_flag=True, help="Let jobs without differential privacy in, as this one is.")
@_installed
@click.option("--yes", is_flag=True, help="Do not ask.")
def allow(
    config: Asked,
    home: Path,
    table: Path | None,
    dictionary: Path | None,
    query: str | None,
    missing: str,
    without_dp: bool,
    installed: str | None,
    yes: bool,
) -> None:
    """Say what the job in CONFIG discloses, ask, and write into the policy what allows it: roster, algorithm, sums,
    rounds, missing silos, disclosures, model and data set.

    Floors stay as they are (min_cohort, epsilon, noise, ...): a job below them is refused here, and nothing is written.
    """
    from secure_fvi.deployment.job import data_set_of
    from secure_fvi.deployment.policy import check_one_name, read_policy
    from secure_fvi.files import read_bytes, write_bytes
    from secure_fvi.runs import wording
    from secure_fvi.runs.federation import disclosure_of
    from secure_fvi.runs.records import job_dictionary

    job, path = config.job(), home / "policy.toml"
    policy = read_policy(path)
    if table is not None:
        check_one_name(policy, table, data_set_of(job))
    before, found = read_bytes(path, "the policy"), disclosure_of(job)
    _say([*_formula_lines(job), *_alignment_lines(job), *disclosure_lines(found)])
    how: dict[str, Any] = {"query": query, "missing": None if missing == "refuse" else missing}
    if job.alignment is not None:
        how["alignment"] = job.alignment.model_dump(mode="json")
        how["predictor"], installed = installed and _resolved(installed), None
        if job.response is not None and job.response.silo == open_home(home).id:
            how["response"] = list(job.response.columns)
    rules = _allowing(wording.loads(before.decode()), home, job, found, installed)
    if without_dp:
        rules["privacy"]["dp"] = "optional"
    made = _offer_data(rules, home, job, table, dictionary, {k: v for k, v in how.items() if v is not None})
    if not yes and not click.confirm("Is this site to take part in such jobs?"):
        raise click.Abort
    head = "# Written by `secure-fvi policy allow`; only this site edits it. docs/provisioning.md explains each key.\n"
    try:
        if made is not None:
            write_bytes(made, job_dictionary(job.model).to_toml().encode())
        _put(path, (head + wording.dumps(rules)).encode())
        decision = _judge(home, read_policy(path), config, installed)
        read = decision.data is not None and (job.model.formula is not None or job.vertical)
        said = _fits(decision, open_home(home)) if read else ""
    except BaseException:
        _put(path, before)
        if made is not None:
            made.unlink(missing_ok=True)
        raise
    click.echo(f"{said}{config}: this site would take part")


def _fits(decision: Decision, home: Home) -> str:
    """Read the site's table as the job will; how many rows it has, and, without differential privacy, what few of them
    have. Raises DataError, InputError."""
    from secure_fvi.deployment.names import printable
    from secure_fvi.deployment.site_job import check_left_out
    from secure_fvi.privacy.settings import exact_totals
    from secure_fvi.runs.config import chosen
    from secure_fvi.runs.records import formula_model, formula_part

    site = home.id
    config = decision.local_config(site)
    if config.alignment is not None:
        from secure_fvi.deployment.columns_job import read_aligned
        from secure_fvi.runs.columns import response_columns

        assert decision.data is not None
        assert decision.data.path is not None
        path, own = decision.data.path, decision.data.predictor
        columns, ids, _ = read_aligned(Path(path), f"'{path}'", config.alignment)
        told, response = "", config.response
        if response is not None and response.silo in (site, None if home.role == "server" else site):
            _, columns = response_columns(response, columns)
            to = "releases, with noise, what follows from" if home.role == "server" else "tells the other silos"
            told = f"; it {to} {', '.join(response.columns)}"
        names = ", ".join(columns) if own is None else f"{own} of {', '.join(columns)}"
        return (
            f"its table has {len(ids.rows)} people with an identifier of their own; {ids.missing + ids.invalid} rows "
            f"have none that counts, {ids.duplicated} share theirs"
            f"{f'; predictor: {names}' if home.role != 'server' else ''}{told}\n"
        )
    model = formula_model(config.model)
    _, found = formula_part(config, site, model)
    left = found.read - len(found.columns[model.columns[0]])
    said = f"its table fits the dictionary: {found.read} rows, {left} of them left out\n"
    if not exact_totals(chosen(config)[2]):
        return said
    assert decision.data is not None
    check_left_out(home, decision.data.id, found.read, left)
    few = model.few_said(found.columns)
    return f"{said}{printable(few, 4000)}\n" if few else said


def _put(path: Path, content: bytes) -> None:
    from secure_fvi.files import write_bytes

    write_bytes(path, content)
    path.chmod(0o600)


def _allowing(
    rules: dict[str, Any], home: Path, job: Config, found: Disclosure, installed: str | None
) -> dict[str, Any]:
    """The policy's `rules` with what the job needs in their lists, and as many rounds and missing silos."""
    from secure_fvi.deployment.model_hash import manifest
    from secure_fvi.deployment.names import now
    from secure_fvi.deployment.policy import rule_of

    if job.model.formula is not None:
        model = rule_of(job.model)
    else:
        model = {"hash": manifest(job, installed).hash.hex()}
        if installed is not None:
            model["function"] = _resolved(installed)
    for key, value in (
        ("rosters", open_home(home).roster(now()).hash.hex()),
        ("algorithms", job.algorithm.name),
        ("aggregations", found.kind),
        *(("disclosures", name) for name in found.kinds),
        ("model", model),
    ):
        rules[key] = [*(v for v in rules.get(key, []) if v != value), value]
    sums = [found.rounds + found.besides, *(p.at_most for p in found.phases if not p.besides)]
    rules["max_rounds"] = max([rules["max_rounds"], *sums])
    lacking = {"max_differences": found.differences}
    if found.exact or "max_missing" in rules:  # silent, it is what the job's noise allows
        lacking["max_missing"] = found.lacking
    return rules | {key: count for key, count in lacking.items() if count > rules.get(key, 0)}


def _resolved(function: str) -> str:
    """FILE.py:NAME with its whole path."""
    file, _, name = function.rpartition(":")
    return f"{Path(file).resolve()}:{name}"


def _offer_data(
    rules: dict[str, Any], home: Path, job: Config, table: Path | None, dictionary: Path | None, how: dict[str, Any]
) -> Path | None:
    """Add the job's data set to `rules`; where the job's dictionary is to be written, if it is. how: query and missing,
    where given. Raises InputError."""
    from secure_fvi.deployment.job import data_set_of
    from secure_fvi.deployment.names import check_id
    from secure_fvi.errors import InputError

    name, by_formula = data_set_of(job), job.model.formula is not None
    if any(d["id"] == name for d in rules.get("data", [])):
        if table is not None:
            raise InputError(f"the policy has a data set '{name}' already: leave --data out, or edit it there")
        return None
    if (by_formula or job.vertical) and table is None:
        raise InputError(f"the policy has no data set '{name}' yet; name this site's table: --data FILE")
    made = None
    if by_formula and dictionary is None:
        try:
            made = home / f"{check_id(name)}.dictionary.toml"
        except ValueError as error:  # the job names it, and the file would be wherever it likes
            raise InputError(f"the job's data set: {error}; name the dictionary's file: --dictionary FILE") from None
    if made is not None and made.exists():
        raise InputError(f"'{made}' is there already; name it as --dictionary, or remove it")
    paths = {"path": table, "dictionary": dictionary or made}
    said = {key: str(path.resolve()) for key, path in paths.items() if path is not None}
    rules["data"] = [*rules.get("data", []), {"id": name, **said, **how}]
    return made


@policy.command("hash-model")
@_asked()
@_installed
@click.option("--json", "as_json", is_flag=True, help="Print all that the hash is over.")
def hash_model(config: Asked, installed: str | None, as_json: bool) -> None:
    """Print the hash of the model in CONFIG, a job's configuration: source, imports, bounds and versions here."""
    import json

    from secure_fvi.deployment.model_hash import manifest

    found = manifest(config.job(), installed)
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
    _say_line(f"over {', '.join(found.sources)}", err=True)
    _say_line(f"with {', '.join(f'{k} {v}' for k, v in found.versions.items())}", err=True)
    _say_line(f"and {', '.join(f'{k} = {v}' for k, v in found.settings.items())}", err=True)
    click.echo(f"of the secure_fvi {found.package.hex()}", err=True)


# ---- What a job discloses, in words ----


_COHORTS = {
    "all": "all {asked} silos",
    "sampled": "{asked} of {silos} silos, drawn by a coin that follows from the job's seed, which the server chose",
    "asynchronous": "{asked} of {silos} silos, those whose fits are done",
    "sequential": "{asked} of {silos} silos, one after the other",
}
_ROWS = {
    "all": "",
    "silo": ", a row a silo",
    "presence": ", who is in the total",
    "some": ", whether some silo's is not 0",
}


def disclosure_lines(d: Disclosure) -> list[str]:
    """All of what a job discloses in plain words, a line each."""
    return list(_lines(d))


def _kept(d: Disclosure, phase: Phase) -> list[str]:
    """What the phase names that a private job does not release."""
    from secure_fvi.disclosure import WORDS

    if d.privacy is None:
        return []
    blocks = {  # and by which of `DISCLOSURES` a job releases them
        "objective": ("objective", "the bound or a part of it"), "records": ("exact_counts", "a number of records"),
    }  # fmt: skip
    sent = {*d.kinds, *(b.name for b in phase.blocks or ())}
    return [
        said for block, (kind, said) in blocks.items()
        if not sent & {kind, block} and any(word in phase.what for word in WORDS[block])
    ]  # fmt: skip


def _lines(d: Disclosure) -> Iterator[str]:
    from secure_fvi.disclosure import DISCLOSURES, LABELS

    besides = f" and {_many(d.besides, 'sum')} besides: {d.rounds + d.besides} in all" if d.besides else ""
    yield f"{d.algorithm}, {d.kind} sums, {_many(d.silos, 'silo')}, at most {_many(d.rounds, 'round')}{besides}"
    for p in d.phases:
        more = f", and {d.privacy.retries} more after failures" if d.privacy is not None else ""
        more += ", besides the rounds" if p.besides else ""
        yield f"phase '{p.phase}': at most {_many(p.at_most, 'sum')}{more}"
        over = _COHORTS[p.cohort].format(asked=p.asked, silos=d.silos)
        yield f"  each over {over}" + (f"; after losses over {p.at_least} at least" if p.at_least < p.asked else "")
        yield f"  of a silo: {p.what}"
        if kept := _kept(d, p):
            yield f"  not sent of these, under privacy: {', '.join(kept)}"
        if p.blocks is None:
            yield "  its blocks follow from the model, once it is traced"
        else:
            exact = p.exact()
            for b in p.blocks:
                rows = _ROWS[b.rows]
                shape = " x ".join(map(str, b.shape)) or "one number"
                how = "exact" if b.name in exact else "of noised steps" if p.terms and p.terms.steps else "noised"
                yield f"  {b.name}: {shape}{rows}; a silo's within +-{b.bound:g}; {how}"
        if p.terms is not None:
            mechanism = "Skellam" if p.terms.resolution else "Gaussian"
            where = f", in each of {p.terms.steps} steps of a silo's own fit" if p.terms.steps else ""
            yield (
                f"  noise: {mechanism}, {p.terms.noise_multiplier:.4g} times the clipping norm "
                f"{p.terms.settings.clipping_norm:g} (which is of no account for the guarantee){where}"
            )
    if d.differences:
        yield (
            f"{_many(d.differences, 'exact sum')} of its rounds may lack up to {_many(d.missing, 'silo')}: their "
            "differences from others come close to the terms of these"
        )
    if d.kind == "plain":
        yield "the server sees each silo's own contribution: a plain sum hides nothing"
    yield f"who learns a total: {'; '.join(d.learn)}"
    if d.labels:
        tried = d.kind == "homomorphic-unmasked" and d.labels in (LABELS["shared"], LABELS["private"])
        by = "the key holder, who has the totals, can try the labels of few people on each broadcast's digest"
        yield f"the response: {d.labels}{f'; {by}' if tried else ''}"
    yield from _privacy_lines(d)
    form = "" if d.people else "names, types and shapes of what the model reads of a record, "
    yield (
        f"public besides: the silos' names and number, who answered and when, sizes of messages, {form}how many rows "
        "each site's log and ledger have"
    )
    yield f"stays at a silo: {d.keeps}"
    for name in d.kinds:
        yield f"a policy has to list '{name}': {DISCLOSURES[name]}"


def _privacy_lines(d: Disclosure) -> Iterator[str]:
    dp = d.privacy
    if dp is None:
        league = ""
        if 0 < d.withstands < d.silos - 1:
            league = f", or more than {d.withstands} of the {d.silos} silos are in league with a lying server"
        elif d.kind == "masked-unchecked" and not d.withstands:
            league = ", or one of them is in league with a lying server"
        elif d.kind == "homomorphic-unmasked":
            league = ", or the server lies to the key holder, or is in league with it or with one silo"
        hides = (
            f"One total hides a silo among the others, unless all of these put their own terms together{league}, or a "
            "level or a group that spans silos has rows at one site alone: that is the site's own term, and one "
            "patient's where one has it; totals"
        )
        yield (
            "no differential privacy: totals are exact, numbers of records with them. "
            f"{'Totals' if d.kind == 'plain' else hides} of several rounds, taken together, can single out silos and "
            "records"
        )
        return
    strength = f"epsilon {dp.epsilon:g}" if dp.epsilon is not None else f"noise multiplier {dp.noise_multiplier:g}"
    whose = "what one silo holds of each person" if d.people else f"each {dp.unit}"
    yield f"differential privacy of {whose}: {strength} at delta {dp.delta:g}, for all sums together"
    cut = f"of what was cut {dp.unit} by {dp.unit}; one that names points of its own reads single {dp.unit}s off them"
    where = {
        "distributed": f"each silo adds a share; {_many(dp.colluders, 'colluder')} and "
        f"{_many(dp.dropouts, 'loss', 'losses')} are counted on",
        "silo": "each silo adds all of it",
        "server": f"the server adds it, and sees exact totals before, {cut}",
    }
    yield f"noise: {where[dp.noise]}"
    if d.uncounted:
        yield f"what is found will not count the noise: {d.uncounted}"


def _many(count: int, one: str, more: str = "") -> str:
    return f"{count} {one if count == 1 else more or one + 's'}"
