"""What pyproject.toml cannot say: the wheel holds a compiled library, and which one."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))

import glibc


class CompiledDistribution(Distribution):
    """A distribution whose wheel fits one interpreter and one platform."""

    def has_ext_modules(self) -> bool:
        return True


class OneLibrary(build_py):
    """Leaves out the libraries that were built for other interpreters."""

    def find_data_files(self, package: str, src_dir: str) -> list[str]:
        wanted = os.environ.get("EAE_CORE_LIBRARY")
        found: list[str] = super().find_data_files(package, src_dir)
        return [path for path in found if not path.endswith(".so") or wanted is None or Path(path).name == wanted]


class Manylinux(bdist_wheel):
    """Tags the wheel with the oldest glibc that the library's symbols allow."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, plat = super().get_tag()
        wanted = os.environ.get("EAE_CORE_LIBRARY")
        if wanted and plat == f"linux_{platform.machine()}":
            needed = glibc.needed(Path("eae_runtime") / "_core" / wanted)
            plat = re.sub("^linux", f"manylinux_{needed[0]}_{needed[1]}", plat) if needed else plat
        return python, abi, plat


setup(distclass=CompiledDistribution, cmdclass={"build_py": OneLibrary, "bdist_wheel": Manylinux})
