"""Files from somebody else: run directories for report and compare, checkpoints for export."""

import functools
import json
import os
import shutil

from tests.attack.arena import held, kept, undisturbed
from tests.attack.disks import mounted
from tests.processes import run_ranks, warm

NASTY = (
    "<script>alert(1)</script>", "</script><svg onload=alert(1)>", "\x1b[2J\x1b]0;title\x07", "\u202etxt.exe", "../" * 20 + "etc/x",
    "\ud800", "a\nb", 10**400, -1, 1e308, float("nan"), float("inf"), None, True, [], {}, [[]], {"a": {"b": []}}, "", "1",
)  # fmt: skip
FILES = ("run.json", "config.json", "metrics.jsonl", "summary.json")


@functools.cache
def a_run():
    folder = kept()
    undisturbed(folder).check()
    return folder / "run"


def _everything(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def _one_value(chance, value):
    """``value`` with something nasty somewhere in it."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        if chance.random() < 0.15:
            name = chance.choice([one for one in NASTY if isinstance(one, str)])
            return {name if one == key else one: inner for one, inner in value.items()}
        return {**value, key: _one_value(chance, value[key])}
    if isinstance(value, list) and value and chance.random() < 0.85:
        place = chance.randrange(len(value))
        return [*value[:place], _one_value(chance, value[place]), *value[place + 1 :]]
    return chance.choice(NASTY)


def _spoil(path, outside, chance):
    how = chance.choice(["value"] * 6 + ["bytes", "fifo", "device", "link out", "deep", "folder", "loop", "gone"])
    if how == "value":
        lines = path.read_text().split("\n") if path.suffix == ".jsonl" else [path.read_text()]
        place = chance.choice([number for number, line in enumerate(lines) if line.strip()])
        lines[place] = json.dumps(_one_value(chance, json.loads(lines[place])), ensure_ascii=chance.random() < 0.5)
        path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
        return how
    content = path.read_bytes()
    path.unlink()
    if how == "bytes":
        place = chance.randrange(len(content))
        path.write_bytes(content[:place] + chance.randbytes(8) + content[place + 8 :])
    elif how == "fifo":
        os.mkfifo(path)
    elif how == "device":
        path.symlink_to("/dev/zero")
    elif how == "link out":
        path.symlink_to(outside)
    elif how == "deep":
        path.write_text("[" * 100_000 + "\n")
    elif how == "folder":
        path.mkdir()
    elif how == "loop":
        path.symlink_to(path)
    return how


def _asked(folder, *words):
    finished = run_ranks(warm(1, ["-m", "dsframe.cli", *words]), cwd=folder, timeout_seconds=60)
    held("Traceback" not in finished.output, "a traceback instead of a line", finished)
    held(all(letter.isprintable() or letter in "\n" for letter in finished.output), "control characters", finished)
    return finished


def run_directory(folder, chance):
    """``dsframe report`` and ``compare`` of a directory in which a file or two are another's."""
    shutil.copytree(a_run(), folder / "theirs", symlinks=True)
    shutil.copytree(a_run(), folder / "mine", symlinks=True)
    outside = folder / "outside"
    outside.write_text("mine alone")
    tried = []
    for _ in range(chance.randint(1, 2)):
        name = chance.choice(FILES)
        if (folder / "theirs" / name).is_file() and not (folder / "theirs" / name).is_symlink():
            tried.append(f"{name}: {_spoil(folder / 'theirs' / name, outside, chance)}")
    if chance.random() < 0.5:
        page = folder / "theirs" / "report.html"
        page.unlink(missing_ok=True)
        page.symlink_to(outside) if chance.random() < 0.7 else os.mkfifo(page)
        tried.append("report.html leads out")
    before = _everything(folder / "mine")
    codes = [_asked(folder, "report", "theirs").returncode, _asked(folder, "compare", "mine", "theirs").returncode]
    held(outside.read_text() == "mine alone", "a file outside was written", tried)
    held(_everything(folder / "mine") == before, "the other run was changed", tried)
    page = folder / "theirs" / "report.html"
    if page.is_file() and codes[0] == 0:
        text = page.read_text(encoding="utf-8")
        held("<script>alert" not in text, "a script in the page", tried)
        held("<svg onload" not in text, "a script in the page", tried)
    return f"{', '.join(tried)}: exit codes {codes}"


def tokenizer_path(folder, chance):
    """``dsframe export --to huggingface`` of a checkpoint whose manifest names another's tokenizer, or a model of code."""
    from dsframe.checkpoint.store import MANIFEST, dump, read_manifest

    checkpoint = folder / "checkpoints" / "step-00000024"
    shutil.copytree(a_run() / "checkpoints" / checkpoint.name, checkpoint)
    secret = folder / "secret"
    secret.mkdir()
    (secret / "tokenizer.json").write_text('{"mine": "alone"}')
    (secret / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["code.T", None]}, "tokenizer_class": "T"})
    )
    (secret / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass T: pass\n")
    place = chance.choice(
        [
            str(secret),
            f"{checkpoint}/../../secret",
            "/proc/self/environ",
            "/etc",
            "/dev/zero",
            "~",
            "a/b",
            "\x1b[2J",
            "",
        ]
    )
    config = chance.choice(
        [
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 4, "n_head": 1},
            {"model_type": "gpt2", "architectures": ["os"]},
            {"model_type": "gpt2", "auto_map": {"AutoModel": "code.T"}, "architectures": ["GPT2LMHeadModel"]},
            {"model_type": "../../x", "architectures": ["PreTrainedModel"]},
            chance.choice(NASTY),
        ]
    )
    told = {
        "config": chance.choice([json.dumps(config), "{", "[" * 50_000]),
        "tokenizer": place,
        "tokenizer_sha256": chance.choice(["0" * 64, None, "x"]),
    }
    if chance.random() < 0.2:
        told.pop(chance.choice(list(told)))
    manifest = dict(read_manifest(checkpoint))
    (checkpoint / MANIFEST).write_bytes(dump({**manifest, "pretrained": chance.choice([told] * 5 + ["x", [told]])}))
    before = _everything(folder)
    finished = _asked(folder, "export", str(checkpoint), "--to", "huggingface")
    held(finished.returncode in (5, 8), f"exit code {finished.returncode}", finished)
    held(not (folder / "ran").exists(), "another's code was run", finished)
    held(_everything(folder) == before, "files were written or changed", finished)
    return f"tokenizer {place!r}: exit code {finished.returncode}"


def full_export(folder, chance):
    """``dsframe export`` to a disk that fills up meanwhile; then there is room again."""
    to, dtype = chance.choice(["safetensors", "torch"]), chance.choice(["float32", "bfloat16", "float16"])
    checkpoint = a_run() / "checkpoints" / "step-00000024"
    before = _everything(checkpoint)
    with mounted(folder, "size=64k") as target:
        words = ("export", str(checkpoint), "--to", to, "--dtype", dtype, "--out", str(target / "out"))
        free = 4096 * chance.randrange(4)
        with (target / "another's").open("wb", buffering=0) as file:
            file.write(bytes((64 << 10) - free))
        finished = _asked(folder, *words)
        there = {path.name for path in target.iterdir()} - {"another's"}
        held(there == ({"out"} if finished.returncode == 0 else set()), f"left: {there}", finished)
        held(finished.returncode in (0, 8), f"exit code {finished.returncode}", finished)
        (target / "another's").unlink()
        (target / "out").unlink(missing_ok=True)
        held(_asked(folder, *words).returncode == 0, "not exported where there is room")
    held(_everything(checkpoint) == before, "the checkpoint was changed")
    return f"{to} in {dtype}, {free} bytes free: exit code {finished.returncode}"


ATTACKS = {
    "full disk in an export": full_export,
    "another's run directory": run_directory,
    "another's tokenizer": tokenizer_path,
}
