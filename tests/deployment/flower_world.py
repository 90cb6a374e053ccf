"""A consortium whose server Flower's nodes can reach."""

from __future__ import annotations

from pathlib import Path

from deployment_world import World

from secure_fvi.deployment.home import Home


class ReachableWorld(World):
    """The server's certificate names loopback, as Flower's nodes ask for it by its address."""

    def new_home(self, name: str, role: str) -> Home:
        if role != "server":
            return super().new_home(name, role)
        return Home.create(self.root / name, name, "server", ("127.0.0.1",), unsealed=True)


def reachable_world(root: Path) -> World:
    """As `new_world` makes it."""
    world = ReachableWorld(root)
    world.distribute(world.write())
    return world
