"""`secure-fvi policy explain`: what a job discloses, in words and for programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import CommandLine


@pytest.fixture
def line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(tmp_path, capsys)


def _explain(line: CommandLine, *more: str) -> str:
    answer = line("policy", "explain", line.config, *more)
    assert answer.code == 0, answer
    return answer.out


def test_a_job_is_explained_in_words(line: CommandLine) -> None:
    line.change('name = "sfvi"\niterations = 120', 'name = "sfvi-avg"\nrounds = 4\nfamily = "diagonal"')
    text = _explain(line, "--set", "aggregation.kind=masked")
    for words in (
        "sfvi-avg, masked sums, 3 silos, at most 4 rounds",
        "phase 'merge': at most 4 sums",
        "the change of its own copy of q",
        "every silo, since each broadcast follows",
        "no differential privacy",
        "its blocks follow from the model",
        "names, types and shapes of what the model reads of a record, how many rows each site's log",
    ):
        assert words in text
    assert text.count("a policy has to list") == 1
    assert "a policy has to list 'final_likelihood'" in text
    assert "phase 'refine': at most 6 sums, besides the rounds" in text
    text = _explain(line, "--set", "algorithm.barycenter=trusted")
    assert "the server sees each silo's own contribution" in text
    assert "a policy has to list 'per_silo_rows'" in text
    answer = line(
        "policy", "explain", line.config, "--set", "algorithm.barycenter=trusted", "--set", "aggregation.kind=masked"
    )
    assert answer.code == 2
    assert "barycenter = 'trusted'" in answer.err


def test_it_says_how_many_silos_in_league_sums_withstand(line: CommandLine) -> None:
    """Whole sums of few silos any number; sums that recover, and large rosters, so many."""
    masked = ("--set", "aggregation.kind=masked")
    assert "in league" not in _explain(line, *masked)
    assert "One total hides a silo" in _explain(line, *masked)
    assert "One total hides a silo" not in _explain(line, "--set", "aggregation.kind=plain")
    unmasked = _explain(line, "--set", "aggregation.kind=homomorphic", "--set", "aggregation.masks=false")
    assert "in league with it or with one silo" in unmasked
    lacking = ("--set", "aggregation.max_missing=1", "--set", "aggregation.min_cohort=2")
    assert "more than 1 of the 3 silos are in league" in _explain(line, *masked, *lacking)


def test_blocks_and_noise_are_told_once_the_data_are_read(line: CommandLine) -> None:
    private = ("--set", "privacy.unit=record", "--set", "privacy.noise_multiplier=3.0", "--set", "privacy.delta=1e-3")
    text = _explain(line, "--with-data", "--sandbox", "off", "--set", "aggregation.kind=masked", *private)
    for words in ("direct: 2;", "noise: Skellam, 3 times the clipping norm 1", "1 colluder and 0 losses", "noised"):
        assert words in text
    assert "exact" not in text
    # Of intervals what options and program tell, before anything is charged; without privacy there is no noise.
    none = "what is found will not count the noise: "
    assert f"{none}latents of records and silos follow" in text
    assert none not in _explain(line, "--with-data", "--sandbox", "off", "--set", "aggregation.kind=masked")
    # Of what SFVI sums without privacy two go only where the job says so.
    kept = "not sent of these, under privacy: "
    assert kept + "the bound or a part of it, a number of records" in text
    shown = _explain(line, "--set", "privacy.public_counts=true", "--set", "aggregation.kind=masked", *private)
    assert kept + "the bound or a part of it\n" in shown
    assert kept not in _explain(line, "--set", "aggregation.kind=masked")


def test_it_says_whom_privacy_protects(line: CommandLine, tmp_path: Path) -> None:
    """Of columns what one silo holds of a person; the control has silos of records."""
    private = [
        f"privacy.{each}" for each in ("unit=record", "epsilon=3.0", "delta=1e-3", "clipping_norm=1.0", "noise=silo")
    ]
    options = [part for each in private for part in ("--set", each)]
    assert "differential privacy of each record: epsilon 3" in _explain(line, *options)
    columns = tmp_path / "columns.toml"
    columns.write_text('[model]\nprogram = "vertical-logistic"\n[algorithm]\nname = "vertical"\nrounds = 9\n')
    answer = line("policy", "explain", columns, "--set", "aggregation.kind=plain", *options)
    assert answer.code == 0, answer
    assert "differential privacy of what one silo holds of each person: epsilon 3" in answer.out


def test_without_the_sites_folder_one_line_says_what_it_is(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with it, or the variable, the command looks there."""
    monkeypatch.delenv("SECURE_FVI_HOME", raising=False)
    answer = line("policy", "allow", line.config)
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    for words in ("Missing option '--home'", "This site's folder", "keys init", "SECURE_FVI_HOME"):
        assert words in answer.err
    monkeypatch.setenv("SECURE_FVI_HOME", str(line.folder / "nowhere"))
    assert "nowhere" in line("policy", "allow", line.config).err
