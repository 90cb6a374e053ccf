"""Bad input gets one clear line and exit code 2, and nothing is written."""

import numpy as np
import pytest
from command_line import CommandLine


def test_missing_configuration(cli: CommandLine) -> None:
    cli.config.unlink()
    cli.refused("no configuration file", "config.toml")


def test_a_configuration_of_notepads_is_read(cli: CommandLine) -> None:
    cli.config.write_text("\ufeff" + cli.config.read_text().replace("seed = 3", "sede = 3"), encoding="utf-8")
    cli.refused("'sede'", "did you mean 'seed'")  # what follows the byte order mark


def test_malformed_configuration(cli: CommandLine) -> None:
    cli.change("seed = 3", "seed = = 3")
    cli.refused("config.toml", "not a TOML file", "line 2")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("seed = 3", "sede = 3", ("'sede'", "did you mean 'seed'")),
        ("[run]", "[run]\ndevise = 'cpu'", ("'run.devise'", "did you mean 'device'", "checkpoint_seconds")),
        ("iterations = 120", "iteration = 120", ("'algorithm.iteration'", "did you mean 'iterations'")),
        ("iterations = 120", "virtual_clients = 2", ("'virtual_clients' is of algorithm.name = 'pvi'",)),
        ('kind = "plain"', 'kind = "masked"\nmin_cohorts = 3', ("'aggregation.min_cohorts'", "'min_cohort'")),
        ("[algorithm]", "[algorithm.local_family]\nscales = 'dense'\n[algorithm]", ("local_family.scales", "'scale'")),
        ('data = "b.csv"', 'date = "b.csv"', ("'silo[1].date'", "did you mean 'data'")),
    ],
)
def test_unknown_key(cli: CommandLine, old: str, new: str, words: tuple[str, ...]) -> None:
    cli.change(old, new)
    cli.refused("unknown key", "allowed:", *words)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("seed=1.5", ("seed = 1.5", "whole number")),
        ("seed=-1", ("seed = -1", "at least 0")),
        ("run.dtype=flaot64", ("run.dtype", "'flaot64'", "'float32'", "did you mean 'float64'")),
        ("run.compile=maybe", ("run.compile = 'maybe'", "true or false or 'auto'")),
        ("run.device=cuda:99", ("device", "cuda:99")),
        ("run.device=tpu", ("device", "tpu")),
        ("algorithm.name=sfv", ("algorithm.name = 'sfv'", "did you mean 'sfvi'")),
        ("algorithm.family=ful", ("algorithm.family = 'ful'", "'low_rank'", "did you mean 'full'")),
        ("algorithm.importance_samples=many", ("algorithm.importance_samples = 'many'", "whole number")),
        ("algorithm.importance_samples=0", ("algorithm.importance_samples = 0", "at least 1")),
        ("algorithm.learning_rate=true", ("algorithm.learning_rate = True", "a number")),
        ("algorithm.optimizer=adm", ("algorithm", "optimizer", "adm", "adam")),
        ("algorithm.local_family=3", ("algorithm.local_family", "table")),
        ("aggregation.kind=mask", ("aggregation.kind = 'mask'", "homomorphic, masked, plain", "did you mean 'masked'")),
        ("model.silo_sites=[3]", ("model.silo_sites[0] = 3", "a string")),
        ("partition.count=2", ("either [partition] or [[silo]]",)),
        ("seed.x=1", ("--set 'seed.x=1'", "'seed' is no table")),
        ("seed", ("--set 'seed'", "table.key=value")),
    ],
)
def test_bad_value(cli: CommandLine, setting: str, words: tuple[str, ...]) -> None:
    cli.refused(*words, more=("--set", setting))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("sizes = [300, 200]", ("partition.sizes", "537", "500")),
        ("sizes = [300, 0, 237]", ("partition", "'silo-2'", "0 records", "at least one")),
        ("count = 538", ("partition.count = 538", "at most 537")),
        ("count = 2\nsizes = [300, 237]", ("partition", "either sizes")),
        ('count = 2\nids = ["a", "a"]', ("partition", "two silos have the id 'a'")),
        ('count = 2\nids = ["a"]', ("partition", "1 silos", "2")),
    ],
)
def test_bad_partition(cli: CommandLine, table: str, words: tuple[str, ...]) -> None:
    cli.config.write_text(f'[model]\nprogram = "six-cities"\n[partition]\n{table}\n')
    cli.refused(*words)


def test_unknown_program_and_unknown_loader_option(cli: CommandLine) -> None:
    cli.config.write_text('[model]\nprogram = "six-citys"\n[partition]\ncount = 3\n')
    cli.refused("model.program", "'six-citys'", "did you mean 'six-cities'")
    cli.config.write_text('[model]\nprogram = "six-cities"\n[partition]\ncount = 3\n[data]\nyears = 3\n')
    cli.refused("unknown key 'data.years'")


def test_no_silos(cli: CommandLine) -> None:
    cli.config.write_text('[model]\nprogram = "six-cities"\n')
    cli.refused("no silos", "[partition]")


def test_model_file_and_function(cli: CommandLine) -> None:
    cli.change("model.py:means", "model.py:mean")
    cli.refused("model.function", "no function 'mean'", "did you mean 'means'")
    cli.change("model.py:mean", "modell.py:means")
    cli.refused("model.function", "no file", "modell.py")
    cli.change("modell.py:means", "means")
    cli.refused("'means'", "path/to/file.py:name")
    (cli.folder / "broken.py").write_text("def f(:\n")
    cli.change('"means"', '"broken.py:f"')
    cli.refused("model.function", "broken.py", "SyntaxError")


def test_sites_that_do_not_exist(cli: CommandLine) -> None:
    cli.refused("'shop'", more=("--set", 'model.silo_sites=["shop"]'))
    cli.refused("'patient'", more=("--set", "model.record_plate=patient"))
    cli.refused("start names 'shop'", more=("--set", "model.start.shop=1.0"))


def test_discrete_latent(cli: CommandLine) -> None:
    cli.change("model.py:means", "model.py:discrete")
    cli.refused("'z'", "discrete")


def test_missing_data_file(cli: CommandLine) -> None:
    (cli.folder / "b.csv").unlink()
    cli.refused("silo[1].data", "no file", "b.csv")


def test_data_file_of_an_unknown_kind(cli: CommandLine) -> None:
    cli.change("b.csv", "b.xlsx")
    cli.refused("silo[1].data", "b.xlsx", ".csv, .tsv, .txt, .parquet")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ("b.csv", "first line")),
        ("y[0],y[1]\n", ("silo[1].data", "b.csv", "no records")),
        ("y[0],y[1]\n1,2\n3\n", ("b.csv", "line 3 has not as many cells")),
        ("y[0],y[1]\n1,2\n3,secret\n", ("b.csv", "'y[1]'", "no number in 1 row (2)")),
        ("y[0],y[1]\n1,2\n3,nan\n", ("b.csv", "'y[1]'", "no number in 1 row (2)")),
        ("y[0],y[1]\n1,2\n3,\n", ("b.csv", "'y[1]'", "a gap in 1 row (2)", "fill them")),
        ("y[0],y[1]\n1,2\n3,3_12\n", ("b.csv", "'y[1]'", "no number in 1 row (2)")),
        ('y[0],y[1]\n1,2\n3,"1,5"\n', ("b.csv", "'y[1]'", "a comma in a number in 1 row (2)")),
        (
            "y[0],y[1],record_id\n1,2,9007199254740993\n",
            ("b.csv", "'record_id'", "no whole number of at most 15 digits"),
        ),
        ("y[0],y[2]\n1,2\n", ("b.csv", "'y'", "without a gap")),
        ("y[0],y[0]\n1,2\n", ("b.csv", "names must differ", "column 1 in the first line")),
        ("y[0],y[1],x\n1,2,3\n", ("'a'", "'b'", "x")),
        ("y[0],y[1],record_id\n1,2,3\n", ("record_id", "all silos")),
    ],
)
def test_malformed_data(cli: CommandLine, content: str, words: tuple[str, ...]) -> None:
    (cli.folder / "b.csv").write_text(content)
    cli.refused(*words)
    assert "secret" not in cli.run().err


def test_malformed_arrays(cli: CommandLine) -> None:
    cli.change("b.csv", "b.npz")
    (cli.folder / "b.npz").write_bytes(b"not an archive")
    cli.refused("silo[1].data", "b.npz", "not an npz file")
    np.savez(cli.folder / "b.npz", y=np.array([{"an": "object"}], dtype=object))
    cli.refused("silo[1].data", "b.npz", "plain numbers")
    np.savez(cli.folder / "b.npz", y=np.ones((3, 2)), x=np.ones(2))
    cli.refused("silo[1].data", "one row a record", "'y' has 3", "'x' has 2")
    np.savez(cli.folder / "b.npz", y=np.array([[1.0, np.inf]]))
    cli.refused("'b'", "'y'", "infinite")
    cli.change("b.npz", "b.safetensors")
    (cli.folder / "b.safetensors").write_bytes(b"\0" * 20)
    cli.refused("silo[1].data", "not a safetensors file")


def test_two_silos_with_one_id(cli: CommandLine) -> None:
    cli.change('id = "b"', 'id = "a"')
    cli.refused("two silos have the id 'a'")


def test_records_with_one_id(cli: CommandLine) -> None:
    for silo in "abc":
        path = cli.folder / f"{silo}.csv"
        path.write_text("record_id,y[0],y[1]\n7,1.0,2.0\n")
    cli.refused("record id", "twice")


def test_cohort_too_small(cli: CommandLine) -> None:
    cli.change('kind = "plain"', 'kind = "masked"\nmin_cohort = 4')
    cli.refused("4", "3")


def test_usage(cli: CommandLine) -> None:
    for arguments in (
        ("run", cli.config),
        ("run", cli.config, "--ouput", "x"),
        ("rum",),
        ("compare", "a", "--draws", "many"),
    ):
        answer = cli(*arguments)
        assert answer.code == 2
        assert answer.err.count("\n") == 1, answer.err


def test_compare_needs_a_finished_run(cli: CommandLine) -> None:
    answer = cli("compare", cli.folder / "nothing")
    assert answer.code == 2
    assert "holds no run" in answer.err
    assert answer.err.count("\n") == 1


def test_debug_shows_where(cli: CommandLine) -> None:
    answer = cli.run("--debug", "--set", "seed=x")
    assert answer.code == 2
    assert "Traceback" in answer.err
    assert "Traceback" not in cli.run("--set", "seed=x").err
