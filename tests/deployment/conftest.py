from pathlib import Path

import pytest
from deployment_world import World, new_world


@pytest.fixture(autouse=True)
def _reports(undrawn: None) -> None:
    """What they say of a deployed job is in their words."""


@pytest.fixture(scope="session")
def first_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return new_world(tmp_path_factory.mktemp("consortium"))


@pytest.fixture
def world(first_world: World, tmp_path: Path) -> World:
    """A consortium of one's own: a signed roster, accepted by all."""
    return first_world.copy(tmp_path / "world")
