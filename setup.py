"""Maps the repository's folders to the packages of `pegboard`; all else stands in pyproject.toml."""

from setuptools import find_packages, setup

FOLDERS = ("core", "toolkit", "plugins", "conformance", "tools")
ROOTS = {"pegboard": "pegboard", **{f"pegboard.{folder}": folder for folder in FOLDERS}}

setup(
    packages=[
        package
        for name, folder in ROOTS.items()
        for package in [name, *(f"{name}.{child}" for child in find_packages(folder))]
    ],
    package_dir=ROOTS,
)
