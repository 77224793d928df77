"""Finds the tritonserver to run, and prepares what it needs and the folder it runs in.

A binary of NVIDIA's images runs as it is. The one in the PyPI wheel nvidia-pytriton needs its
private libraries, a libpython for the stubs and a backend folder with the stub of this Python's
version. All of that is put together from links in the run folder: site-packages may be read-only,
and many adapters may start at once, so nothing is ever written there.
"""

import ctypes.util
import fcntl
import importlib.metadata
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from adapter.errors import BackendUnavailable
from adapter.triton.server import cleanup

_INSTALL = "install it from a clone of the adapter's repository: pip install '.[embedded]'"
_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_HELP_SECONDS = 10.0
_WHEEL_BACKENDS = frozenset({"python"})
LIBPYTHON = f"libpython{_VERSION}.so.1.0"
_ALLOCATOR_CHOICE = re.compile("MALLOC_.+|LD_PRELOAD")  # jemalloc reads MALLOC_CONF
_MIB = 2**20
# glibc raises its own threshold to the size of each freed block, up to 32 MiB, and from then on
# takes such blocks from heaps, where small ones between them keep the rest. Below 2 MiB the
# threshold makes tensors of one MiB slower as well; with 4 MiB two to three times as much stays.
# A fixed threshold also fixes how much stays at the top of a heap, at 128 KiB: each request with a
# tensor would have its pages made anew.
_MMAP_THRESHOLD_BYTES = 2 * _MIB
_TRIM_THRESHOLD_BYTES = 8 * _MIB


@dataclass(frozen=True, slots=True)
class Launch:
    """A binary to execute, with the arguments and environment that it alone needs."""

    binary: Path
    arguments: tuple[str, ...]
    environment: Mapping[str, str]


def prepare(setting: Path | None, folder: Path) -> Launch:
    """Find the binary and put what it needs into `folder`. BackendUnavailable when it cannot be."""
    wheel = wheel_folder()
    binary = _find(setting, wheel)
    if wheel is None or wheel not in binary.resolve().parents:
        return Launch(binary, (), {})
    if (reason := unfit(sys.version_info[:2], _numpy_version())) is not None:
        raise BackendUnavailable(reason, delivered=False)
    return _from_wheel(wheel, binary, folder)


def accepted(
    binary: Path, environment: Mapping[str, str], options: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the arguments for those of the options that the server's --help lists: it does not
    start with one that it does not know.
    """
    try:
        done = subprocess.run(
            [binary, "--help"],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_HELP_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    known = re.findall(rb"--[\w-]+", done.stdout + done.stderr)
    return tuple(f"{name}={value}" for name, value in options.items() if name.encode() in known)


def allocator_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that have glibc give large freed blocks back to the system; none if the
    environment chooses or tunes an allocator itself.
    """
    if any(_ALLOCATOR_CHOICE.fullmatch(name) for name in environment):
        return {}
    return {
        "MALLOC_MMAP_THRESHOLD_": str(_MMAP_THRESHOLD_BYTES),
        "MALLOC_TRIM_THRESHOLD_": str(_TRIM_THRESHOLD_BYTES),
    }


def unfit(python: tuple[int, int], numpy: str | None) -> str | None:
    """Why Python models cannot run on the wheel's server in such an environment.

    With numpy 2 every request fails in the python backend of Triton 2.51: "output tensor shape
    does not match size of output". numpy 1 does not exist for Python 3.13 and later.
    """
    if python >= (3, 13):
        return (
            "the tritonserver of nvidia-pytriton runs models on Python 3.12 and older, this is"
            f" {python[0]}.{python[1]}; use Python 3.12, or the tritonserver of an NVIDIA image"
        )
    if numpy is None or not numpy.startswith("1."):
        return (
            "the tritonserver of nvidia-pytriton needs numpy 1.x, here is"
            f" {numpy or 'none'}; install it with: pip install 'numpy<2'"
        )
    return None


def find_libpython() -> Path | None:
    """Return the shared library of this Python: a full path, or a bare name if the system's loader
    finds it; None if there is none.
    """
    libdir = Path(sysconfig.get_config_var("LIBDIR") or "")
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    # the last is where scripts/libpython.py puts the one that it fetched
    for folder in (libdir, libdir / multiarch, Path(sys.base_prefix, "lib"), libpython_folder()):
        if (found := folder / LIBPYTHON).is_file():
            return found
    if ctypes.util.find_library(f"python{_VERSION}") == LIBPYTHON:
        return Path(LIBPYTHON)
    return None


def libpython_folder() -> Path:
    return Path(sys.prefix, "lib")


def take_port(ports: ExitStack, listener: str, host: str, port: int) -> int:
    """Bind the port until `ports` is closed, without listening; 0 means any free one.

    So nobody else is given it, while the server, which sets SO_REUSEADDR as well, can listen on it,
    after each restart too. BackendUnavailable when it cannot be had.
    """
    taken = ports.enter_context(socket.socket())
    try:
        if port == 0:  # with SO_REUSEADDR set first, two adapters may be given the same one
            taken.bind((host, port))
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if port != 0:
            taken.bind((host, port))
    except OSError as error:
        raise BackendUnavailable(
            f"cannot listen at {host}:{port}, Triton's {listener} address: {error.strerror};"
            f" set another by --triton-{listener}={host}:PORT, where port 0 is any free one",
            delivered=False,
        ) from error
    return int(taken.getsockname()[1])


class RunFolder:
    """A folder that lives as long as its process: removed at the end, or by the next to start.

    The lock tells a live owner from one that was killed. The folder gets its final name only once
    it is locked, so that no sweep ever sees one without. Its name is also the prefix of Triton's
    shared memory regions.
    """

    _PREFIX = "triton-adapter-"
    LOCK = "adapter.lock"
    ENVIRONMENTS = "environments"

    def __init__(self) -> None:
        made = Path(tempfile.mkdtemp(prefix=f".{self._PREFIX}"))
        self._lock: int | None = os.open(made / self.LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(made.with_name(made.name[1:]))

    def remove(self) -> None:
        if self._lock is not None:
            _clear(self.path)
            os.close(self._lock)
            self._lock = None

    def note_environment(self, place: Path) -> None:
        """Have this folder of Triton's removed when Triton has ended. Raises OSError."""
        cleanup.note_environment(self.path / self.ENVIRONMENTS, place)

    def remove_environments(self) -> None:
        """Remove what a Triton that has ended left of those that were noted."""
        cleanup.remove_environments(self.path / self.ENVIRONMENTS)

    @classmethod
    def sweep(cls) -> None:
        """Remove what a killed adapter of the same user left behind."""
        for path in Path(tempfile.gettempdir()).glob(f"{cls._PREFIX}????????"):
            with suppress(OSError):  # locked by its owner, or another sweep was faster
                lock = os.open(path / cls.LOCK, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if path.lstat().st_uid == os.getuid():
                        _clear(path)
                finally:
                    os.close(lock)


def _clear(folder: Path) -> None:
    for region in Path("/dev/shm").glob(f"{folder.name}*"):  # noqa: S108 - where Triton puts them
        region.unlink(missing_ok=True)
    lock, notes = folder / RunFolder.LOCK, folder / RunFolder.ENVIRONMENTS
    cleanup.remove_environments(notes)
    for path in folder.iterdir():
        if path == notes:  # what it names could not be removed
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path != lock:
            path.unlink(missing_ok=True)
    with suppress(OSError):  # the lock last: by it the next start finds what could not be removed
        if [*folder.iterdir()] == [lock]:
            shutil.rmtree(folder, ignore_errors=True)


def _find(setting: Path | None, wheel: Path | None) -> Path:
    if setting is not None:
        if not setting.is_file():
            raise BackendUnavailable(f"no tritonserver at {setting}", delivered=False)
        return setting.absolute()
    if (on_path := shutil.which("tritonserver")) is not None:
        return Path(on_path).absolute()
    if wheel is not None:
        return wheel / "bin" / "tritonserver"
    here = sys.version_info[:2]
    advice = _INSTALL if here < (3, 13) else unfit(here, None)  # the extra is empty there
    raise BackendUnavailable(f"no tritonserver found; {advice}", delivered=False)


def wheel_folder() -> Path | None:
    """Return the wheel's server folder, None if the wheel is not installed. The package is located,
    not imported: nothing of it is needed.
    """
    spec = importlib.util.find_spec("pytriton")
    for location in (spec and spec.submodule_search_locations) or ():
        root = Path(location, "tritonserver").resolve()
        if (root / "bin" / "tritonserver").is_file():
            return root
    return None


def wheel_backends() -> frozenset[str] | None:
    """Return the backends of the server in the wheel; None if it would not be the one to run."""
    if wheel_folder() is None or shutil.which("tritonserver") is not None:
        return None
    return _WHEEL_BACKENDS


def _numpy_version() -> str | None:
    try:
        return importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError:
        return None


def _from_wheel(wheel: Path, binary: Path, folder: Path) -> Launch:
    backend = folder / "backends" / "python"
    libraries = folder / "lib"
    for made in (backend, libraries):
        made.mkdir(parents=True)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        (backend / name).symlink_to(wheel / "backends" / "python" / name)
    stub = "triton_python_backend_stub"
    _place_executable(wheel / "python_backend_stubs" / _VERSION / stub, backend / stub)
    _place_executable(binary.resolve(), folder / "tritonserver")
    _place_libpython(libraries)
    search = [str(libraries), str(wheel.parent.parent / "nvidia_pytriton.libs")]
    return Launch(
        folder / "tritonserver",
        (f"--backend-directory={backend.parent}",),
        {
            "LD_LIBRARY_PATH": _joined(*search, os.environ.get("LD_LIBRARY_PATH")),
            # the stub takes the first python3 on PATH for its own: it must be this environment's
            "PATH": _joined(str(Path(sys.prefix, "bin")), os.environ.get("PATH")),
        },
    )


def _place_libpython(folder: Path) -> None:
    """Link the library: its folder on the loader's path may hold unrelated ones."""
    found = find_libpython()
    if found is None:
        raise BackendUnavailable(
            f"{LIBPYTHON} is missing, which Triton's python backend needs;"
            f" Debian and Ubuntu have it in the package libpython{_VERSION}",
            delivered=False,
        )
    if found.is_absolute():
        (folder / LIBPYTHON).symlink_to(found)


def _place_executable(source: Path, target: Path) -> None:
    """Link the source if it may be executed, else copy it: some installers drop that bit."""
    if os.access(source, os.X_OK):
        target.symlink_to(source)
    else:
        shutil.copyfile(source, target)
        target.chmod(0o755)


def _joined(*folders: str | None) -> str:
    return os.pathsep.join(folder for folder in folders if folder)
