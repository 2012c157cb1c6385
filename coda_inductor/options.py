# SPDX-License-Identifier: Apache-2.0
"""The options of ``torch.compile(model, backend="coda", options={...})``, parsed and checked."""

import dataclasses
import os
import re
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coda_inductor.compat import inductor_config, list_mode_options, list_options
from coda_inductor.errors import OptionError, PatternError, suggest
from coda_inductor.log import say_once

GATES = ("auto", "always", "never")
_CHOICES = {"gate": GATES, "tune": GATES, "numerics": ("fused", "eager")}
#: (option, another option, the other's value that leaves the first without effect).
_WITHOUT_EFFECT = (("tune_seconds", "tune", "never"), ("patterns", "numerics", "eager"))
#: Options of earlier versions, which are warned of for one more: code that sets them still runs.
_REMOVED = {
    "aot": "nothing is fused in programs of AOTInductor. Run the exported program in Python "
    "instead: torch.compile(program.module(), backend='coda')",
    **dict.fromkeys(
        ("fp8", "fp8_skip", "fp8_small"),
        "no layer is converted to FP8 by it. Convert the model with torchao's "
        "convert_to_float8_training, whose module_filter_fn chooses layers (docs/fp8.md)",
    ),
}
#: Values of ``CODA_DEBUG`` and ``CODA_STRICT`` that do not turn them on.
_OFF = ("", "0", "false", "no", "off")
#: The name of the whole backend in ``disable``, and the prefix of a GEMM's name.
EVERYTHING, GEMM = "*", "gemm:"


@dataclass(frozen=True)
class Options:
    """The options of a user, which docs/options.md explains.

    Attributes:
        debug: write a folder for each compiled graph.
        debug_dir: where the debug folders go.
        strict: raise :class:`~coda_inductor.errors.FallbackError` where a fallback would happen.
        patterns: extra pattern files, or folders of them, tried before the built-in ones.
        disable: names of patterns, passes or counters that must not fire; ``"gemm:PATH"`` for the
            GEMMs of a module, which are then not fused; ``"*"`` for stock Inductor.
        gate: ``"auto"`` fuses a site where it is expected to win, ``"always"`` wherever it is
            legal, ``"never"`` leaves every GEMM to Inductor.
        tune: ``"always"`` measures every site of a graph without a measurement of its own, and then
            plans the graph again; ``"never"`` none; ``"auto"`` does so where Inductor's
            ``max_autotune`` is set.
        tune_seconds: how long that may take for one graph.
        reference: run every fused site in the reference executor even if kernels exist, with the
            kernels' numerics on every device: products are not rounded before their epilogue.
        numerics: ``"eager"`` rounds each value where eager does, in epilogues and in Inductor's
            kernels: rewrites that round elsewhere are off. ``"fused"`` rounds only stored values.
        fp16_norms: let RMSNorm's row scale move past float16 GEMMs, where the un-normalized operand
            can exceed float16's range.
        memory: how much memory a training step may take. Bytes: the peak on the device, with all
            that other tensors hold when the graph is compiled. "fit": the memory that is free then,
            less 5 %. A number from 0 to 1: the share of what torch.compile keeps for the backward
            pass. Tensors beyond that are computed again. None: torch's own setting.
        inductor: Inductor's own options, passed on.
    """

    debug: bool = False
    debug_dir: str = "coda_debug"
    strict: bool = False
    patterns: tuple[str, ...] = ()
    disable: tuple[str, ...] = ()
    gate: str = "auto"
    tune: str = "auto"
    tune_seconds: float = 60.0
    reference: bool = False
    numerics: str = "fused"
    fp16_norms: bool = False
    memory: int | float | str | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """All options that change the compiled result, as text, for cache keys."""
        relevant = dataclasses.replace(self, debug=False, debug_dir="", inductor={})
        return repr(relevant)

    @property
    def measures(self) -> bool:
        """Are sites measured while a graph is compiled?"""
        autotune = self.inductor.get("max_autotune", inductor_config.max_autotune)
        return not self.reference and self.tune in ("always", "auto" if autotune else "")


_KEYS = {f.name: f for f in dataclasses.fields(Options) if f.name != "inductor"}


def parse(mode: str | None, options: Mapping[str, Any] | None) -> Options:
    """Check and complete the mode and the options that the user passed to ``torch.compile``.

    Raises:
        OptionError: unknown key or mode, or a value of the wrong type; lists what is allowed.
        PatternError: a pattern path does not exist.
    """
    # Where the environment is ignored (python -I), it must not name files with code.
    patterns = () if sys.flags.ignore_environment else _listed("CODA_PATTERNS", os.pathsep)
    values: dict[str, Any] = {
        "debug": _env_flag("CODA_DEBUG"),
        "strict": _env_flag("CODA_STRICT"),
        "debug_dir": os.environ.get("CODA_DEBUG_DIR", "coda_debug"),
        "patterns": patterns,
        "disable": env_disable(),
        "tune": _check("tune", os.environ.get("CODA_TUNE") or "auto", "CODA_TUNE"),
    }
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(
            f"options is a dict of names and values, as {{'debug': True}}, got {options!r}"
        )
    given, inductor = options or {}, dict(_mode_options(mode))
    inductor_names = set(list_options())
    for key, value in given.items():
        if key in ("patterns", "disable"):  # before the environment's
            values[key] = tuple(dict.fromkeys((*_check(key, value), *values[key])))
        elif key in _KEYS:
            values[key] = _check(key, value)
        elif key in inductor_names:
            inductor[key] = _check_inductor(key, value)
        elif key in _REMOVED:
            say_once(f"option {key!r} has no effect any more: {_REMOVED[key]}")
        else:
            hint = suggest(key, _KEYS) or suggest(key, inductor_names)
            raise OptionError(
                f"unknown option {key!r} for backend='coda'{hint}. Its own options "
                f"are {', '.join(sorted(_KEYS))}; Inductor's (torch._inductor.list_options()) are "
                "accepted too"
            )
    _warn_without_effect(given, values)
    for path in values["patterns"]:
        if not Path(path).exists():
            name = "option 'patterns'" if path in given.get("patterns", ()) else "CODA_PATTERNS"
            raise PatternError(f"{name}: no such file {path!r}; give paths of .py files or folders")
    return Options(**values, inductor=inductor)


def _warn_without_effect(given: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    for key, other, value in _WITHOUT_EFFECT:
        if values.get(key) and values.get(other) == value:
            say_once(f'option {key!r} has no effect where {other!r} is "{value}"')
    if "debug_dir" in given and "debug" not in given and not values["debug"]:
        say_once("option 'debug_dir' has no effect without {'debug': True}")


def _env_flag(name: str) -> bool:
    return os.environ.get(name, "").lower() not in _OFF


def _listed(name: str, separator: str) -> tuple[str, ...]:
    return tuple(filter(None, os.environ.get(name, "").split(separator)))


def env_disable() -> tuple[str, ...]:
    """The names in ``CODA_DISABLE``."""
    return _listed("CODA_DISABLE", ",")


def _mode_options(mode: str | None) -> Mapping[str, Any]:
    if mode is None or mode == "default":
        return {}
    modes = list_mode_options()
    if mode not in modes:
        names = ", ".join(dict.fromkeys(("default", *modes)))
        raise OptionError(f"unknown mode {mode!r}{suggest(mode, modes)}; known modes are {names}")
    return modes[mode]


def _check_inductor(key: str, value: Any) -> Any:
    expected = inductor_config.get_type(key.replace("-", "_"))
    if typing.get_origin(expected) is None and not isinstance(value, expected):
        raise OptionError(f"Inductor's option {key!r} takes {expected.__name__}, got {value!r}")
    return value


def _check(key: str, value: Any, name: str = "") -> Any:
    if key in ("patterns", "disable"):
        if isinstance(value, (str, os.PathLike)):
            value = (value,)
        try:
            return tuple(os.fspath(v) for v in value)
        except TypeError:
            raise OptionError(f"option {key!r} takes a list of strings, got {value!r}") from None
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            choices = ", ".join(_CHOICES[key])
            label, hint = name or f"option {key!r}", suggest(value, _CHOICES[key])
            raise OptionError(f"{label} is one of {choices}, got {value!r}{hint}")
        return value
    if key == "tune_seconds":
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < float("inf"):
            raise OptionError(f"option {key!r} takes a positive number of seconds, got {value!r}")
        return float(value)
    if key == "memory":
        return _memory(value)
    if key == "debug_dir":
        if not isinstance(value, (str, os.PathLike)):
            raise OptionError(f"option 'debug_dir' takes a path, got {value!r}")
        return os.fspath(value)
    if not isinstance(value, bool):
        raise OptionError(f"option {key!r} takes True or False, got {value!r}")
    return value


def _memory(value: Any) -> int | float | str | None:
    """The limit: bytes as int, a share as float, or "fit"; None without one."""
    if value is None or value == "fit":
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(?:([KMGT])(i?))?B\s*", str(value))
    if match is not None and float(match[1]) > 0:
        unit = 1024 if match[3] else 1000
        return int(float(match[1]) * unit ** " KMGT".index(match[2] or " "))
    raise OptionError(
        f'option \'memory\' takes a peak with its unit ("40 GiB"), "fit" or a number from 0 to 1, '
        f"got {value!r}"
    )
