"""Maps the folders `core` and `plugins` to pegboard.core and pegboard.plugins; all else stands in pyproject.toml."""

from setuptools import find_packages, setup

ROOTS = {"pegboard.core": "core", "pegboard.plugins": "plugins"}

setup(
    packages=[
        package
        for name, folder in ROOTS.items()
        for package in [name, *(f"{name}.{child}" for child in find_packages(folder))]
    ],
    package_dir=ROOTS,
)
