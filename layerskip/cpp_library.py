"""C++ that is compiled for this machine when it is first needed."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

LOG = logging.getLogger(__name__)

SWITCH = "LAYERSKIP_KERNELS"
"""Environment variable; 0 leaves all of it out."""
FLAGS = ("-std=gnu++17", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared", "-w")
_MOST_COMPILE_S = 120


def load_cpp(source: Path, flags: Sequence[str], kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL | str:
    """The library of a source, or in a few words why there is none. kind: ctypes.PyDLL where calls are so short that
    they keep Python's lock.

    Cost: a compilation of some seconds when a machine does it for the first time; it is kept in the user's cache.
    """
    if os.environ.get(SWITCH) == "0":
        return f"switched off by {SWITCH}=0"
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return f"not for {platform.system()} on {platform.machine()}"
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        return "no C++ compiler (g++ or clang++)"
    try:
        return kind(str(_compiled(source, [compiler, *flags])))
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or str(error)
        lines = str(output).strip().splitlines() or ["?"]
        return f"compiling them failed: {next((line for line in lines if 'error' in line), lines[0])}"


def _compiled(source: Path, command: list[str]) -> Path:
    """The library's file, made unless it is there. Raises: OSError or SubprocessError."""
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True).stdout
    made_of = (source.read_text(encoding="utf-8"), version, " ".join(command), _cpu())
    name = f"{source.stem}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "layerskip"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder):
            pass
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="layerskip-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / name
    if not path.is_file():
        LOG.info("compiling %s for this CPU", source.name)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / name
            subprocess.run(
                [*command, str(source), "-o", str(made)],
                capture_output=True,
                text=True,
                check=True,
                timeout=_MOST_COMPILE_S,
            )
            made.replace(path)
    return path


def _cpu() -> str:
    """What this CPU can do: a home directory may be another machine's, too."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({one for one in lines if one.startswith(("flags", "Features", "model name"))}))
