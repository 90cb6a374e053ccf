"""Names of the distributions in this environment on which the requirement that is given does not stand, a line each."""

import sys
from importlib import metadata

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name


def needed(root: str) -> set[str]:
    """Canonical names of what `root`, extras included, needs on this machine, itself among them."""
    left, found = [Requirement(root)], set[tuple[str, frozenset[str]]]()
    while left:
        wanted = left.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key in found:
            continue
        found.add(key)
        for line in metadata.requires(wanted.name) or ():
            one = Requirement(line)
            if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in ("", *wanted.extras)):
                left.append(one)
    return {name for name, _ in found}


if __name__ == "__main__":
    installed = {canonicalize_name(d.metadata["Name"]) for d in metadata.distributions()}
    print(*sorted(installed - needed(sys.argv[1]) - {"pip"}), sep="\n")
