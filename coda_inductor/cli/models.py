# SPDX-License-Identifier: Apache-2.0
"""The model is a Hugging Face family (--hf llama) or a folder with its config
(--hf ./my_llama), or FILE.py:FUNCTION or MODULE:FUNCTION, where the function
returns (model, args) or (model, args, kwargs). It is not run, and --hf models
take no memory."""

import argparse
import ast
import contextlib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from coda_inductor.errors import ExplainError, OptionError, PatternError, suggest
from coda_inductor.options import parse

_WORDS = ("true", "false", "none")
_DTYPES = ("bfloat16", "float16", "float32")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that name a model, and describe them."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = f"{parser.description}\n\n{__doc__}"
    parser.add_argument("target", nargs="?", help="FILE.py:FUNCTION or MODULE:FUNCTION")
    parser.add_argument("--hf", metavar="FAMILY",
                        help="a language model's model_type, e.g. llama, or a folder with its "
                        "config.json")  # fmt: skip
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[],
                        help="a value of the --hf config, e.g. num_hidden_layers=4")  # fmt: skip
    parser.add_argument("--batch", type=positive,
                        help="sequences (--hf), by default one, or 2048 tokens")  # fmt: skip
    parser.add_argument("--dtype", choices=_DTYPES, help="of --hf models, by default bfloat16")
    parser.add_argument("--train", action="store_true", help="forward and backward")
    parser.add_argument("--option", metavar="KEY=VALUE", action="append", default=[],
                        help="an option of the backend, e.g. gate=always")  # fmt: skip


def model_of(
    arguments: argparse.Namespace, tokens: int | None
) -> tuple[Callable[..., Any], tuple, dict[str, Any]]:
    """The model that the arguments name, and its arguments: (model, args, kwargs). ``tokens``: the
    length of a sequence, for Hugging Face models; None for 2048, or the model's maximum. Raises
    OptionError, which tells what to write, if there is no such model, and ExplainError if
    transformers is missing."""
    if (arguments.target is None) == (arguments.hf is None):
        raise OptionError("name either FILE.py:FUNCTION or --hf FAMILY")
    if arguments.hf is not None:
        return _hugging_face(arguments, tokens)
    for name in ("set", "batch", "dtype", "tokens"):
        if getattr(arguments, name):
            raise OptionError(
                f"--{name} is for --hf models: {arguments.target} creates its own model and inputs"
            )
    result = _function(arguments.target)()
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not callable(result[0]):
        raise OptionError(f"{arguments.target} must return (model, args) or (model, args, kwargs)")
    model, args, *rest = result
    args = args if isinstance(args, (tuple, list)) else (args,)
    return model, tuple(args), dict(rest[0]) if rest else {}


def _function(target: str) -> Callable[[], Any]:
    file, colon, name = target.rpartition(":")
    if not colon or not file:
        raise OptionError(
            f"{target!r} does not name a function: write FILE.py:FUNCTION or MODULE:FUNCTION"
        )
    if file.endswith(".py"):
        path = Path(file)
        if not path.is_file():
            raise OptionError(f"no such file: {file}")
        spec: Any = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # pickles and dataclasses of the file look it up
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(file)
        except ModuleNotFoundError as error:
            raise OptionError(f"{file}: {error}; name a FILE.py or an importable module") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise OptionError(f"{file} has no function {name!r}")
    return function


def _hugging_face(
    arguments: argparse.Namespace, tokens: int | None
) -> tuple[Callable[..., Any], tuple, dict[str, Any]]:
    """A model whose weights have no values, because only shapes are needed. Its memory is reserved
    but never used; if the memory cannot even be reserved, the model is on the meta device."""
    try:
        import transformers
    except ImportError:
        raise ExplainError("--hf needs transformers: pip install transformers") from None
    values = dict(_setting(text, "--set") for text in arguments.set)
    family, saved = arguments.hf, {}
    if (file := Path(family, "config.json")).is_file():
        saved = json.loads(file.read_text(encoding="utf-8"))
        family = saved.pop("model_type", None)
    families = transformers.CONFIG_MAPPING.keys()
    if family not in families:
        hint = suggest(family, families)
        if os.sep in str(family):
            hint = "; it takes one, as llama, or a folder with a config.json, and downloads nothing"
        raise OptionError(f"--hf {arguments.hf}: transformers has no such model_type{hint}")
    try:
        config = transformers.AutoConfig.for_model(family, **{**saved, **values})
    except Exception as error:  # a wrong type raises an error of huggingface_hub
        cause = " ".join(str(error).split())
        raise OptionError(f"--hf {arguments.hf}: {cause[:300]}") from None
    settings = config.__class__().to_dict()
    if unknown := [key for key in values if key not in settings]:
        raise OptionError(
            f"--set {unknown[0]}: {type(config).__name__} has no such value; it has "
            f"{', '.join(sorted(settings))}"
        )
    masked = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING  # BERT has a causal head too
    head = "MaskedLM" if masked and not config.is_encoder_decoder else "CausalLM"
    with torch.device("meta"):
        try:
            model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
        except ValueError:
            model = transformers.AutoModel.from_config(config)
    model = model.to(getattr(torch, arguments.dtype or _DTYPES[0])).train(arguments.train)
    with contextlib.suppress(RuntimeError):
        model = model.to_empty(device="cpu")
        model.tie_weights()
        for indices in (b for b in model.buffers() if not b.is_floating_point()):
            indices.zero_()  # a model with a graph break runs, and looks them up
    device = next(model.parameters()).device
    most = getattr(config, "max_position_embeddings", None) or 2048
    length = tokens or min(2048, most - most % 8)
    batch = arguments.batch or (1 if tokens else max(1, 2048 // length))
    ids = torch.zeros((batch, length), dtype=torch.long, device=device)
    return model, (ids,), {"labels": ids} if arguments.train and speaks(model) else {}


def positive(text: str) -> int:
    """Convert a command-line argument to a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def speaks(model: Callable[..., Any]) -> bool:
    """Is it a language model, which reads tokens and returns logits?"""
    return any(part in type(model).__name__ for part in ("CausalLM", "LMHead", "MaskedLM"))


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of the backend in the arguments. Raises OptionError for a bad name or value."""
    options = dict(_setting(text, "--option") for text in arguments.option)
    try:
        parse(None, options)
    except PatternError as error:
        raise OptionError(str(error)) from None
    return options


def _setting(text: str, flag: str) -> tuple[str, Any]:
    """``"gate=always"`` -> ("gate", "always"); numbers, booleans and None become values."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise OptionError(f"{flag} {text!r}: write KEY=VALUE")
    with contextlib.suppress(ValueError, SyntaxError):
        return key, ast.literal_eval(value.title() if value.lower() in _WORDS else value)
    return key, value
