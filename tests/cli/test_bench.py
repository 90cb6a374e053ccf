"""`bench step` measures every contestant and says so in the agreed form; what it measures is not asserted."""

import json

import pytest
from command_line import CommandLine


@pytest.mark.slow
def test_bench_step_prints_the_agreed_json(cli: CommandLine) -> None:
    answer = cli("bench", "step", "--json", "--repeats", "1", "--iterations", "2")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found["machine"]
    times = found["ms_per_iteration"]
    assert {"pyro_svi", "numpyro_svi", "plain_1", "masked_3"} <= times.keys()
    assert all(ms > 0 for name, ms in times.items() if name != "numpyro_svi")
