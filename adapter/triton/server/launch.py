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
    """Find the binary, and put what it needs into `folder`.

    Raises BackendUnavailable if there is no binary, or if it cannot run models here.
    """
    wheel = wheel_folder()
    binary = _find(setting, wheel)
    if wheel is None or wheel not in binary.resolve().parents:
        return Launch(binary, (), {})
    if (reason := explain_unfit(sys.version_info[:2], _numpy_version())) is not None:
        raise BackendUnavailable(reason, delivered=False)
    return _from_wheel(wheel, binary, folder)


def select_known(
    binary: Path, environment: Mapping[str, str], options: Mapping[str, str]
) -> tuple[str, ...]:
    """Return arguments for the options that the server's --help lists; none without an answer.

    The server does not start with an option that it does not know.
    """
    try:
        answer = subprocess.run(
            [binary, "--help"],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_HELP_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    known = re.findall(rb"--[\w-]+", answer.stdout + answer.stderr)
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


def explain_unfit(python: tuple[int, int], numpy: str | None) -> str | None:
    """Return why Python models cannot run on the wheel's server with these versions; None if they
    can.

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
    for folder in (libdir, libdir / multiarch, Path(sys.base_prefix, "lib"), libpython_folder()):
        library = folder / LIBPYTHON
        if library.is_file():
            return library
    if ctypes.util.find_library(f"python{_VERSION}") == LIBPYTHON:
        return Path(LIBPYTHON)
    return None


def libpython_folder() -> Path:
    """Return the folder of this environment into which scripts/libpython.py puts the library."""
    return Path(sys.prefix, "lib")


def take_port(ports: ExitStack, listener: str, host: str, port: int) -> int:
    """Bind a port, 0 for any free one, until `ports` is closed; return its number.

    Nothing listens on the port here. So nobody else is given it, while the server, which sets
    SO_REUSEADDR as well, can listen on it, after each restart too. Raises BackendUnavailable with
    the setting of the `listener` if the port is taken.
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
    """Holds the files of one run in a folder: removed at its end, or by the next adapter to start.

    The lock tells a live owner from one that was killed. The folder gets its final name only once
    it is locked, so that no sweep ever sees one without. Its name is also the prefix of Triton's
    shared memory regions.
    """

    _PREFIX = "triton-adapter-"
    LOCK = "adapter.lock"
    ENVIRONMENTS = "environments"

    def __init__(self) -> None:
        """Make the folder, and lock it."""
        hidden = Path(tempfile.mkdtemp(prefix=f".{self._PREFIX}"))
        self._lock: int | None = os.open(hidden / self.LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = hidden.rename(hidden.with_name(hidden.name[1:]))
        self.notes = self.path / self.ENVIRONMENTS  # of environments that Triton may leave behind

    def remove(self) -> None:
        """Remove the folder and all that Triton left behind. A second call does nothing."""
        if self._lock is not None:
            _clear(self.path)
            os.close(self._lock)
            self._lock = None

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
    """Remove a run folder with the environments and shared memory of its Triton."""
    for region in Path("/dev/shm").glob(f"{folder.name}*"):  # noqa: S108 - where Triton puts them
        region.unlink(missing_ok=True)
    lock = folder / RunFolder.LOCK
    notes = folder / RunFolder.ENVIRONMENTS
    cleanup.remove_environments(notes)
    for path in folder.iterdir():
        if path == notes:  # the notes that remain name folders that could not be removed
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path != lock:
            path.unlink(missing_ok=True)
    # the lock goes last: by it the next start finds what could not be removed
    with suppress(OSError):
        if [*folder.iterdir()] == [lock]:
            shutil.rmtree(folder, ignore_errors=True)


def _find(setting: Path | None, wheel: Path | None) -> Path:
    """Return the binary of the setting, of PATH or of the wheel. Raises BackendUnavailable."""
    if setting is not None:
        if not setting.is_file():
            raise BackendUnavailable(f"no tritonserver at {setting}", delivered=False)
        return setting.absolute()
    if (on_path := shutil.which("tritonserver")) is not None:
        return Path(on_path).absolute()
    if wheel is not None:
        return wheel / "bin" / "tritonserver"
    python = sys.version_info[:2]
    # from Python 3.13 on the extra installs nothing
    advice = _INSTALL if python < (3, 13) else explain_unfit(python, None)
    raise BackendUnavailable(f"no tritonserver found; {advice}", delivered=False)


def wheel_folder() -> Path | None:
    """Return the wheel's server folder; None if the wheel is not installed.

    The package is located, not imported: its code is not needed.
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
    """Link the wheel's server with its python backend and libraries into the run folder.

    Raises BackendUnavailable without a libpython.
    """
    backend = folder / "backends" / "python"
    libraries = folder / "lib"
    backend.mkdir(parents=True)
    libraries.mkdir()
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
    """Link libpython into the folder: its own may hold libraries that Triton must not load.

    Raises BackendUnavailable without a libpython.
    """
    library = find_libpython()
    if library is None:
        raise BackendUnavailable(
            f"{LIBPYTHON} is missing, which Triton's python backend needs;"
            f" Debian and Ubuntu have it in the package libpython{_VERSION}",
            delivered=False,
        )
    if library.is_absolute():
        (folder / LIBPYTHON).symlink_to(library)


def _place_executable(source: Path, target: Path) -> None:
    """Link the source if it may be executed, else copy it: some installers drop that bit."""
    if os.access(source, os.X_OK):
        target.symlink_to(source)
    else:
        shutil.copyfile(source, target)
        target.chmod(0o755)


def _joined(*folders: str | None) -> str:
    return os.pathsep.join(folder for folder in folders if folder)
