"""A job of three silos and a server in folders: its configuration, the sites' policies, and ways to run it."""

from __future__ import annotations

import threading
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

from deployment_world import NOW, World

from secure_fvi.deployment.countersigning import countersign, open_trail
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.model_hash import manifest
from secure_fvi.deployment.serving import remote_federation
from secure_fvi.deployment.site import Site, run_site
from secure_fvi.deployment.site_job import Local
from secure_fvi.errors import SecureFVIWarning
from secure_fvi.runs import wording
from secure_fvi.runs.config import Config
from secure_fvi.runs.directory import RunDirectory
from secure_fvi.runs.reading import read
from secure_fvi.runs.running import execute, execute_federation

_turn = threading.Lock()
_handle = Site.handle


def _one_at_a_time(self: Site, job: str, message: bytes) -> bytes:
    """Pyro's handlers are one stack a process, and here several silos share one."""
    with _turn:
        return _handle(self, job, message)


Site.handle = _one_at_a_time  # type: ignore[method-assign]

SILOS = ("east", "north", "south")
HOLDER = "escrow"  # only in a world that has one
SIX_CITIES = {
    "seed": 3,
    "model": {"program": "six-cities"},
    "partition": {"ids": list(SILOS), "sizes": [200, 180, 157]},
    "run": {"compile": False},
}


def met(hub: Home, site: Site) -> None:
    """Server and site countersign each other's records: a site takes no new job before."""
    with closing(open_trail(hub)) as trail:
        countersign(
            hub, hub.roster(NOW), trail, [site.home.id], lambda asked: {s: site.handle("", m) for s, m in asked.items()}
        )


class Job:
    """One configuration in a world whose policies allow it."""

    def __init__(self, world: World, folder: Path, allow: bool = True, **tables: Any) -> None:
        self.world, self.folder = world, folder
        self.path = folder / "job.toml"
        self.path.write_text(wording.dumps({k: v for k, v in {**SIX_CITIES, **tables}.items() if v is not None}))
        self.config: Config = read(self.path)
        self.sites = [s for s, home in world.homes.items() if home.role != "server"]
        for site in self.sites if allow else ():
            self.allow(site)

    def allow(self, site: str, **changes: Any) -> None:
        """Write a site's policy, which allows this job unless `changes` say otherwise."""
        home = self.world.homes[site]
        privacy = {"dp": "optional", "max_epsilon": 10.0, "max_delta": 1e-4, "min_noise_multiplier": 0.1}
        policy = {
            "format": 1,
            "rosters": [home.roster(NOW).hash.hex()],
            "algorithms": [self.config.algorithm.name],
            "aggregations": [self.config.aggregation.kind],
            "min_cohort": 3,
            "max_rounds": 100_000,
            "disclosures": ["final_likelihood"],
            "privacy": {**privacy, "noise": ["distributed", "silo"]},
            "model": [{"hash": manifest(self.config).hash.hex()}],
            "data": [{"id": "data"} if self.config.silo else {"id": "data", "from_job": ["partition", "data"]}],
            **changes,
        }
        home.policy_file.write_text(wording.dumps(policy))
        home.policy_file.chmod(0o600)

    def local(self, name: str = "local") -> bytes:
        """The posterior of the same job with all parties in this process."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SecureFVIWarning)
            execute(self.config, RunDirectory(self.folder / name))
        return (self.folder / name / "posterior.safetensors").read_bytes()

    def run(self, name: str = "remote", local: Local | None = None, **watch: Any) -> bytes:
        """The posterior of the job with the silos in threads, over TLS on loopback. `watch`: on_round, or on_sites,
        which is told of the silos as well."""
        out = self.folder / name
        sites = Sites(self, out, local or Local(repeatable=True))
        sites.start()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SecureFVIWarning)
                folder = RunDirectory(out)
                federation = remote_federation(self.config, self.world.homes["hub"], folder, "127.0.0.1:0")
                on_sites = watch.get("on_sites")
                told = watch.get("on_round") if on_sites is None else lambda progress: on_sites(progress, sites)
                execute_federation(federation, folder, True, told)
        finally:
            sites.stop()
        return (out / "posterior.safetensors").read_bytes()


class Sites:
    """The silos, and the key holder where there is one, in threads. Each dials the port that the server writes down."""

    def __init__(self, job: Job, out: Path, local: Local) -> None:
        self._job, self._out, self._local = job, out, local
        self._stops = {site: threading.Event() for site in job.sites}
        self.errors: dict[str, Exception] = {}
        self._threads = [threading.Thread(target=self._run, args=(site,), daemon=True) for site in job.sites]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _run(self, silo: str) -> None:
        port, stop = self._out / "checkpoint" / "port", self._stops[silo]
        while not port.exists() and not stop.wait(0.05):
            pass
        if stop.is_set():
            return
        try:
            address = f"127.0.0.1:{port.read_text()}"
            run_site(self._job.world.homes[silo], address, self._local, stop=stop)
        except Exception as error:
            self.errors[silo] = error

    def leave(self, silo: str) -> None:
        """One silo goes and does not come back."""
        self._stops[silo].set()

    def stop(self) -> None:
        for event in self._stops.values():
            event.set()
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()
