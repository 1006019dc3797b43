"""Builds the CPU kernels with CMake into the package; everything else stands in pyproject.toml.

The library is loaded with ctypes, so one wheel serves every Python 3. Where it can't be built (no compiler), the
install goes on without it: the package then computes in plain torch and says so once when it runs.
"""

import os
import pathlib
import shutil
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).resolve().parent
LIBRARY = "_C_cpu.so"


def _find_program(name: str) -> str | None:
    """Find a program beside this interpreter (an environment that isn't activated), then on the path."""
    beside = str(pathlib.Path(sys.executable).parent)
    return shutil.which(name, path=os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]))


class BuildKernels(build_ext):
    """Runs CMake for the one extension there is."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")[:-1], LIBRARY)

    def build_extension(self, ext: Extension) -> None:
        if os.environ.get("VLLM_BUILD_KERNELS") == "0":
            return  # a second environment on the same checkout uses the library that is there
        target = pathlib.Path(self.get_ext_fullpath(ext.name)).resolve()
        try:
            built = self._run_cmake()
        except (OSError, subprocess.CalledProcessError) as error:
            self.warn(f"the compiled kernels could not be built, the package will be slower: {error}")
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        # A new file, not new contents: a process that has the old library mapped keeps it.
        temporary = target.with_suffix(".tmp")
        shutil.copy2(built, temporary)
        temporary.replace(target)

    def _run_cmake(self) -> pathlib.Path:
        cmake, ninja = _find_program("cmake"), _find_program("ninja")
        if cmake is None:
            raise OSError("cmake was not found")
        build_folder = pathlib.Path(self.build_temp).resolve() / "cpu"
        build_folder.mkdir(parents=True, exist_ok=True)
        generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
        subprocess.run([cmake, "-S", ROOT, "-B", build_folder, *generator], check=True)
        subprocess.run([cmake, "--build", build_folder, "--config", "Release", "--parallel"], check=True)
        return build_folder / LIBRARY


class Wheel(bdist_wheel):
    """Tags the wheel for every Python 3 on this platform: the library knows nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("vllm._C_cpu", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
)
