"""Virtual environments that really lack a package: every other distribution of this one, by symbolic links."""

import subprocess
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

from packaging.utils import canonicalize_name


def environment_without(missing, folder):
    """Makes a virtual environment at `folder` with all of this one but the distributions `missing`; returns its bin."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    site = Path(sysconfig.get_path("purelib"))
    taken = {part for found in distributions() if canonicalize_name(found.name) in missing for part in top_level(found)}
    assert taken, f"none of {missing} is installed here: nothing is missing in the new environment"
    target = next((folder / "lib").glob("python3*")) / "site-packages"
    for entry in site.iterdir():
        if entry.name not in taken and entry.name != "__pycache__":
            (target / entry.name).symlink_to(entry)
    scripts = Path(sysconfig.get_path("scripts"))
    for name, owner in {"torchrun": "torch", "horovodrun": "horovod", "deepspeed": "deepspeed"}.items():
        if owner not in missing:
            script = folder / "bin" / name
            script.write_text((scripts / name).read_text().replace(str(scripts), str(folder / "bin")))
            script.chmod(0o755)
    return folder / "bin"


def top_level(distribution):
    """What a distribution put right into site-packages."""
    return {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
