# SPDX-License-Identifier: Apache-2.0
"""What the wheel holds. Everything else about the project is in pyproject.toml.

The pattern files live in the top-level folder patterns/, where people read them; an installed copy
needs them inside the package. The mapping below ships that folder as ``coda_inductor/_patterns``,
and together with an automatic list of packages it cannot be said in pyproject.toml.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["coda_inductor", "coda_inductor.*"]),
        "coda_inductor._patterns",
    ],
    package_dir={"coda_inductor._patterns": "patterns"},
    package_data={
        "coda_inductor": ["py.typed"],
        "coda_inductor.explanation": ["templates/*"],
        "coda_inductor.select": ["tables/*.json"],
    },
    include_package_data=False,
)
