# SPDX-License-Identifier: Apache-2.0
"""What a site is expected to take where nothing was measured. Constants are an H100's."""

import json

from coda_inductor.gpu import tables
from coda_inductor.select.roofline import product_us


def test_products_of_what_was_measured_take_about_as_long():
    errors = []
    for gpu in tables(None).values():
        for row in json.loads(gpu.sites.read_text())["sites"]:
            like, size = row["like"].split(), row["key"].split(" ")[1]
            if like[:2] == ["1", "bfloat16"] and "=" not in row["key"]:
                n, k = map(int, size.split("x")[1:])
                errors.append(product_us(row["m"], n, k, gpu) / row["plain"] - 1)
    errors.sort()
    assert len(errors) > 300
    assert abs(errors[len(errors) // 2]) < 0.05
    assert -0.25 < errors[len(errors) // 20] < errors[-len(errors) // 20] < 0.25
