"""Whether Python finds SplitServe's three packages where they belong: their names are names that others use too."""

from __future__ import annotations

from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from cluster.user_error import UserError

_NAMES = ("cluster", "replicas", "scheduler")


def check_package_roots(folder: Path) -> None:
    """folder: where the command is run. Raises UserError where another package or file would be taken for ours.

    PyPI has packages of our names; and Ray lets its processes look into `folder` first, whatever this process does.
    """
    roots = {name: _root(find_spec(name)) for name in _NAMES}
    if None in roots.values() or len(set(roots.values())) != 1:
        found = ", ".join(f"{name} in {roots[name] or 'no folder'}" for name in _NAMES)
        raise UserError(f"the packages of SplitServe must lie in one folder, but Python finds {found}")
    for name in _NAMES:
        spec = PathFinder.find_spec(name, [str(folder)])
        if _root(spec) not in (None, roots[name]):
            assert spec is not None
            raise UserError(
                f"{spec.origin} has the name of a package of SplitServe, and Ray's processes look into the folder that "
                "the command is run in first: run it in another one"
            )


def _root(spec: ModuleSpec | None) -> Path | None:
    """Folder of a module or package; None where there is none. A folder without __init__.py is in nobody's way."""
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).resolve()
    return file.parents[1] if file.name == "__init__.py" else file.parent
