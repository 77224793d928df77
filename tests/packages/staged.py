"""Packages that are staged without a Triton, and what is in the repository then."""

from adapter.core.model import ModelId, ModelSource, TritonName

CONFIG = '# mine\r\nname: "other"; backend: "python"\r\n'
STAGED_CONFIG = b'# mine\r\n  backend: "python"\r\n'


def make(folder, config=CONFIG):
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text("weights")
    (folder / "config.pbtxt").write_bytes(config.encode())
    return folder


def tree(folder):
    """Every path below, links not followed, with what is behind it."""
    return {
        str(path.relative_to(folder)): path.readlink()
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in folder.rglob("*")
    }


async def prepare(packages, name, folder, **hints):
    source = ModelSource(str(folder), **hints)
    return await packages.prepare(TritonName(name), ModelId(f"id of {name}"), source)


async def put(packages, name, package):
    return await packages.place(TritonName(name), ModelId(f"id of {name}"), package)


async def place(packages, name, folder, **hints):
    return await put(packages, name, await prepare(packages, name, folder, **hints))


async def remove(packages, *names):
    for name in names:
        await packages.remove(TritonName(name))


def ensemble(*steps):
    """Steps side by side, from IN to an output for each."""
    outputs = "".join(f'output {{ name: "{number}" }} ' for number, _ in enumerate(steps))
    names = "".join(
        f'step {{ model_name: "{step}" model_version: -1 input_map {{ key: "IN" value: "IN" }}'
        f' output_map {{ key: "OUT" value: "{number}" }} }} '
        for number, step in enumerate(steps)
    )
    ends = f'input {{ name: "IN" }} {outputs}' if steps else ""
    return f'platform: "ensemble" {ends}ensemble_scheduling {{ {names}}}'
