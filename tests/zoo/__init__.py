# SPDX-License-Identifier: Apache-2.0
"""All models that tests compile, one class a role, and what they are called with.

``layers``: a gated MLP and what stands around it, attention, a decoder
``heads``: a head with its loss, and a table that may be its head
``idioms``: what passes and patterns look for, as functions of an input and of weights
``edges``: models at the edge of what a rewrite is good for, and whether errors are as small there
``experts``: blocks of experts, in every spelling
``diffusion``: blocks of diffusion transformers, as diffusers writes them
``families``: Hugging Face's model families, tiny
``float8``: models in torchao's FP8, and their graphs in float64 with nothing rounded
``users``: pattern files as users write them
"""
