"""`make train` on every Python of this machine, and a first run with the newest torch: the table of docs/support.md.

    python -m tests.versions              # make versions; 3 GB of CUDA for each Python without a CPU-only torch
    python -m tests.versions 3.13.0       # one Python; prints its rows and leaves the page as it is

Each row begins with nothing but a clone of this commit: an empty home, and PATH with the system's folders alone.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.processes import REPOSITORY

PAGE = REPOSITORY / "docs" / "support.md"
START, END = "<!-- make versions -->\n", "<!-- end of make versions -->\n"
HEADER = "| Python | what is typed | versions | what came out |\n|---|---|---|---|\n"
SCRIPTS = {
    "make train": """
        git clone -q "$REPOSITORY" clone && cd clone && ln -s clone/.venv ../venv
        ARGS="--set dsframe.steps=100" make train""",
    "pip install 'CLONE[deepspeed]', newest torch": """
        SECONDS=0; "$PYTHON" -m venv venv && . venv/bin/activate
        pip install -q --upgrade torch && pip install -q "$REPOSITORY[deepspeed]" && echo "setup: done in $SECONDS s"
        python -c 'import torch, deepspeed; print(f"setup: torch {torch.__version__}, DeepSpeed {deepspeed.__version__}")'
        dsframe init first --from own && cd first && dsframe launch --config config.json -np 2""",
}
RESULTS = {
    "make train": r"^runs/\w+: (the same training as .*), as rounding",
    "pip install 'CLONE[deepspeed]', newest torch": r"^  (loss +[\d.]+) in the last step",
}


def pythons():
    """Yields version and path of each interpreter 3.10 to 3.13 that can make environments."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    seen = set()
    for folder in (Path("/usr/bin"), *sorted(root.glob("versions/*/bin")), *map(Path, os.get_exec_path())):
        for path in sorted(folder.glob("python3.1[0-3]")):
            probe = [path, "-c", "import ensurepip, sys, venv; print(*sys.version_info[:3], sep='.')"]
            version = subprocess.run(probe, capture_output=True, text=True, check=False, timeout=60).stdout.strip()
            if version and version not in seen and ".venv" not in path.parts:
                seen.add(version)
                yield version, str(path)


def run(version, path, typed):
    """Returns the row, and whether it ended with the same training and without a FutureWarning."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "TORCH_INDEX", "SSL_"))}
    with tempfile.TemporaryDirectory(prefix="dsframe-versions-") as home:
        env = kept | {"PATH": os.defpath, "HOME": home, "PYTHON": path, "REPOSITORY": str(REPOSITORY)}
        script = ["bash", "-euc", SCRIPTS[typed]]
        done = subprocess.run(script, cwd=home, env=env, capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
    found = [re.findall(pattern, output, re.MULTILINE) for pattern in (r"setup: (torch .*)", RESULTS[typed])]
    well = done.returncode == 0 and all(found) and "FutureWarning" not in output
    if not well:
        print(output[-3000:], file=sys.stderr)
    versions, result = (matches[-1] if matches else "" for matches in found)
    return f"| {version} | `{typed}` | {versions} | {result if well else 'failed'} |\n", well


def main(only):
    """Prints the table, writes it into docs/support.md, and returns 1 where a row failed."""
    chosen = [(version, path) for version, path in pythons() if not only or version in only]
    commit = subprocess.check_output(["git", "-C", REPOSITORY, "rev-parse", "--short", "HEAD"], text=True).strip()
    rows = []
    for version, path in chosen:
        for typed in SCRIPTS:
            rows.append(run(version, path, typed))
            print(rows[-1][0], end="", flush=True)
    if not only:
        before, rest = PAGE.read_text().split(START)
        table = f"At {commit}:\n\n{HEADER}{''.join(row for row, _ in rows)}"
        PAGE.write_text(before + START + table + END + rest.split(END)[1])
    return int(not all(well for _, well in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
